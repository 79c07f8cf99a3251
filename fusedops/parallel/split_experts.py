"""The experts of a layer divided over ranks: ``nn.MoE`` as ``expert_parallel`` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fusedops.nn import MoE
from fusedops.parallel.expert import Experts, Trip, expert_parallel
from fusedops.parallel.tensor import check_type, distribute, local
from fusedops.parallel.tokenwise import put_around

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fusedops.ops import RoutingPlan


def split_experts(module: MoE, mesh: DeviceMesh, *, chunks: int = 1) -> None:
    """Divide a layer's experts over ranks, each of which has other tokens.

    Args:
        module: has the same parameters on every rank. Those of ``experts`` become DTensors,
            ``Shard(0)``: each rank keeps its consecutive experts. Names and ``state_dict`` stay.
        mesh: the ranks; of one dimension.
        chunks: of the tokens, whose exchange and computation overlap.

    Raises:
        ValueError: the ranks do not divide the experts.
        TypeError: ``module`` is no ``fusedops.nn.MoE``.
    """
    op = "split_experts"
    check_type(op, module, MoE)
    exchange = Exchange(mesh.get_group(), chunks)
    experts: nn.Module = module.experts
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, distribute(op, name, parameter, mesh, 0))
    put_around(experts, lambda each: [local(p) for p in each], exchange)


@dataclass(frozen=True)
class Exchange:
    """Calls the experts of a layer that are divided over a group."""

    group: dist.ProcessGroup
    chunks: int

    def __call__(self, forward: Experts, input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """Return ``[tokens, hidden_size]``."""
        return expert_parallel(input, plan, forward, self.group, chunks=self.chunks)

    def trip(self, forward: Experts, input: torch.Tensor, plan: RoutingPlan) -> Trip:
        """Return the same in steps; the tokens are on their way."""
        return Trip(input, plan, forward, self.group, chunks=self.chunks)
