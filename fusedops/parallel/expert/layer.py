"""The experts of a layer sharded over ranks: ``nn.MoE`` as ``expert_parallel`` runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from fusedops.parallel.tensor.replicated import ParameterSubstitution, parameters_of, substituted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_experts(
    module: MoE,
    mesh: DeviceMesh,
    *,
    chunks: int = 1,
    nodes: DeviceMesh | None = None,
    reduce: str = "source",
    ordered: bool = False,
) -> None:
    """Shard a layer's experts over ranks, each of which has other tokens.

    Args:
        module: has the same parameters on every rank. Those of ``experts`` become DTensors,
            ``Shard(0)``: each rank keeps its consecutive experts. Names and ``state_dict`` stay.
        mesh: the ranks; of one dimension.
        chunks: parts of the tokens whose exchange and computation overlap.
        nodes: the same ranks as ``[nodes, ranks of a node]``: a token is then sent to each node
            once.
        reduce: where a token's results are summed, as for ``moe_dispatch``.
        ordered: sum the gradients that the tokens of each rank give a weight in the order of
            ``ordered_sum``, so that the gradient has the bits that ranks with all experts get when
            they reduce theirs. Each expert then computes the rows of each rank separately.

    Raises:
        ValueError: the ranks do not divide the experts, or ``nodes`` has other ranks; or
            ``ordered`` is combined with chunks, nodes, or weights in half precision, which round
            each sum.
        TypeError: ``module`` is no ``fusedops.nn.MoE``.
    """
    op = "split_experts"
    check_type(op, module, MoE)
    if nodes is not None and (nodes.ndim != 2 or nodes.size() != mesh.size()):
        expected = f"[nodes, ranks of a node], {mesh.size()} ranks together"
        checks.fail(op, "nodes", expected, list(nodes.shape))
    experts: nn.Module = module.experts
    if ordered:
        _check_ordered(op, experts, chunks, nodes)
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, distribute(op, name, parameter, mesh, 0))
    group = mesh.get_group()
    if ordered:
        experts.forward = _OrderedForward(experts, group)
        return
    over: Any = group if nodes is None else nodes
    experts.forward = ParameterSubstitution(
        experts,
        lambda parameters: [_OwnTensor.apply(local(parameter)) for parameter in parameters],
        ExpertExchange(over, chunks, reduce),
    )


class _OwnTensor(torch.autograd.Function):
    """A weight that is no view: ``summed`` recognizes a weight by the views of it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@dataclass(eq=False)
class ExpertExchange:
    """Calls the experts of a layer, sharded over a group.

    Rows are sent in the dtype of the experts' products (under autocast its dtype), which is also
    that of the results. The first call is validated on all ranks, later ones are not.
    """

    group: Group
    chunks: int
    reduce: str
    _is_validated: bool = field(default=False, init=False)

    def __call__(self, forward: Experts, input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """Return ``[tokens, hidden_size]``."""
        (rows,) = lowered(input)
        options: Any = {"chunks": self.chunks, "reduce": self.reduce, "validate": self._validates()}
        return expert_parallel(rows, plan, forward, self.group, **options)

    def start(
        self, forward: Experts, input: torch.Tensor, plan: RoutingPlan
    ) -> StagedExpertParallel:
        """Start to send the tokens, and return the call whose steps the caller runs."""
        op, (rows,) = "expert_parallel", lowered(input)
        groups = groups_of(op, self.group)
        options = DispatchOptions(op, groups, self.reduce, None, self.chunks, self._validates())
        return StagedExpertParallel(options, rows, plan, forward)

    def _validates(self) -> bool:
        """Return whether this call is validated: never a compiled one."""
        if torch.compiler.is_compiling() or self._is_validated:
            return False
        self._is_validated = True
        return True


def _check_ordered(op: str, experts: nn.Module, chunks: int, nodes: DeviceMesh | None) -> None:
    why = "with ordered, which computes the rows of each rank separately"
    if chunks != 1:
        checks.fail(op, "chunks", f"1 {why}", chunks)
    if nodes is not None:
        checks.fail(op, "nodes", f"None {why}", list(nodes.shape))
    for name, parameter in experts.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            checks.fail(
                op, f"the dtype of {name}", "float32 or wider with ordered", parameter.dtype
            )


@dataclass(eq=False)
class _OrderedForward:
    """The ``forward`` of experts that computes the rows of each rank separately."""

    module: nn.Module
    group: dist.ProcessGroup

    @torch.compiler.disable(reason="how many rows each rank sent is known on the host alone")
    def __call__(self, input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """Return ``[tokens, hidden_size]`` for ``[tokens, hidden_size]``."""
        rows, local_plan, handle = moe_dispatch(lowered(input)[0], plan, self.group)
        counts = list(handle.rows_received)
        names = [(owner, name) for owner, name, _ in parameters_of(self.module)]
        weights = [
            _RepeatedWeight.apply(local(parameter), len(counts))
            for *_, parameter in parameters_of(self.module)
        ]
        num_experts = local_plan.num_experts
        ids, probs = local_plan.expert_ids.split(counts), local_plan.probs.split(counts)
        outputs = []
        for rank, part in enumerate(rows.split(counts)):
            order = moe_sort(ids[rank], num_experts)
            part_plan = RoutingPlan(ids[rank], probs[rank], *order, None, num_experts)
            of_rank = [weight[rank] for weight in weights]
            with substituted(dict(zip(names, of_rank, strict=True))):
                outputs.append(type(self.module).forward(self.module, part, part_plan))
        return moe_combine(torch.cat(outputs), handle)


class _RepeatedWeight(torch.autograd.Function):
    """Views of a weight; its gradient is the ordered sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return tuple(weight.view_as(weight) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ordered_sum(grads), None
