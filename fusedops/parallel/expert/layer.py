"""The experts of a layer divided over ranks: ``nn.MoE`` as ``expert_parallel`` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fusedops._core import checks
from fusedops.nn import MoE
from fusedops.ops import RoutingPlan
from fusedops.ops.grouped_mm import lowered
from fusedops.ops.moe_sort import moe_sort
from fusedops.parallel.comm.collectives import ordered_sum
from fusedops.parallel.expert.api import (
    Experts,
    StagedExpertParallel,
    expert_parallel,
    moe_combine,
    moe_dispatch,
)
from fusedops.parallel.expert.arguments import DispatchOptions, Group, groups_of
from fusedops.parallel.tensor.layers import check_type, distribute, local
from fusedops.parallel.tensor.replicated import parameters_of, put_around, standing_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_experts(
    module: MoE,
    mesh: DeviceMesh,
    *,
    chunks: int = 1,
    nodes: DeviceMesh | None = None,
    ordered: bool = False,
) -> None:
    """Divide a layer's experts over ranks, each of which has other tokens.

    Args:
        module: has the same parameters on every rank. Those of ``experts`` become DTensors,
            ``Shard(0)``: each rank keeps its consecutive experts. Names and ``state_dict`` stay.
        mesh: the ranks; of one dimension.
        chunks: of the tokens, whose exchange and computation overlap.
        nodes: the same ranks as ``[nodes, ranks of a node]``: a token then goes to each node once.
        ordered: add what the tokens of each rank say of a weight as ``ordered_sum`` does, so that
            its gradient has the bits that ranks with all experts get when they add theirs. Each
            expert then computes the rows of each rank for themselves.

    Raises:
        ValueError: the ranks do not divide the experts, or ``nodes`` has others; or ``ordered``
            comes with chunks or nodes, or with weights in half precision, which round each sum.
        TypeError: ``module`` is no ``fusedops.nn.MoE``.
    """
    op = "split_experts"
    check_type(op, module, MoE)
    if nodes is not None and (nodes.ndim != 2 or nodes.size() != mesh.size()):
        wanted = f"[nodes, ranks of a node], {mesh.size()} ranks together"
        checks.fail(op, "nodes", wanted, list(nodes.shape))
    experts: nn.Module = module.experts
    if ordered:
        _check_ordered(op, experts, chunks, nodes)
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, distribute(op, name, parameter, mesh, 0))
    group = mesh.get_group()
    if ordered:
        experts.forward = _ByRank(experts, group)
        return
    over: Any = group if nodes is None else nodes
    put_around(
        experts, lambda each: [_Own.apply(local(p)) for p in each], ExpertExchange(over, chunks)
    )


class _Own(torch.autograd.Function):
    """A weight that is a view of nothing: one by whose views ``summed`` knows it again."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@dataclass(frozen=True)
class ExpertExchange:
    """Calls the experts of a layer, sharded over a group.

    Rows are sent in the dtype of the experts' products (under autocast its dtype), which is also
    that of the results.
    """

    group: Group
    chunks: int

    def __call__(self, forward: Experts, input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """Return ``[tokens, hidden_size]``."""
        (rows,) = lowered(input)
        return expert_parallel(rows, plan, forward, self.group, chunks=self.chunks)

    def start(
        self, forward: Experts, input: torch.Tensor, plan: RoutingPlan
    ) -> StagedExpertParallel:
        """Start to send the tokens, and return the call whose steps the caller runs."""
        (rows,) = lowered(input)
        op = "expert_parallel"
        options = DispatchOptions(op, groups_of(op, self.group), chunks=self.chunks)
        return StagedExpertParallel(options, rows, plan, forward)


def _check_ordered(op: str, experts: nn.Module, chunks: int, nodes: DeviceMesh | None) -> None:
    why = "with ordered, which needs the rows of each rank apart"
    if chunks != 1:
        checks.fail(op, "chunks", f"1 {why}", chunks)
    if nodes is not None:
        checks.fail(op, "nodes", f"None {why}", list(nodes.shape))
    for name, parameter in experts.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            checks.fail(
                op, f"the dtype of {name}", "float32 or wider with ordered", parameter.dtype
            )


class _ByRank:
    """Stands as the experts' ``forward`` and computes the rows of each rank by themselves."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module = module
        self._group = group

    @torch.compiler.disable(reason="how many rows each rank sent is known on the host alone")
    def __call__(self, input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """Return ``[tokens, hidden_size]`` for ``[tokens, hidden_size]``."""
        rows, arrived, handle = moe_dispatch(lowered(input)[0], plan, self._group)
        counts = list(handle.rows_received)
        found = list(parameters_of(self._module))
        copies = [_Copies.apply(local(each), len(counts)) for *_, each in found]
        ids, probs = arrived.expert_ids.split(counts), arrived.probs.split(counts)
        outputs = []
        for rank, part in enumerate(rows.split(counts)):
            order = moe_sort(ids[rank], arrived.num_experts)
            of_rank = RoutingPlan(ids[rank], probs[rank], *order, None, arrived.num_experts)
            read = {
                (owner, name): each[rank]
                for (owner, name, _), each in zip(found, copies, strict=True)
            }
            with standing_in(read):
                outputs.append(type(self._module).forward(self._module, part, of_rank))
        return moe_combine(torch.cat(outputs), handle)


class _Copies(torch.autograd.Function):
    """A weight several times; its gradient is the ordered sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return tuple(weight.view_as(weight) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ordered_sum(grads), None
