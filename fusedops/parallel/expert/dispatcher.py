"""The beginning of every exchange: check, agree, pack and send.

Whatever is wrong on one rank is told to all before it raises there, so that nobody waits for rows
that never come.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_sort
from fusedops.parallel.comm.host_groups import connect
from fusedops.parallel.expert.all_to_all import Route
from fusedops.parallel.expert.flat import Departure, Flat, depart, wants_gradient
from fusedops.parallel.expert.hierarchical import Nodes, route_to_nodes, slots_by_node
from fusedops.parallel.expert.metadata import (
    BAD_PLAN,
    BETWEEN_NODES,
    MAX_CHUNKS,
    REDUCTIONS,
    Agreement,
    bad_plan,
)

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"


def start(
    op: str,
    input: torch.Tensor,
    plan: RoutingPlan,
    groups: Sequence[dist.ProcessGroup],
    *,
    grads: bool | None = None,
    chunks: int = 1,
    reduce: str = "home",
    payload: str | None = None,
    max_rows: int | None = None,
) -> Sequence[Flat | Nodes]:
    """Check, agree, pack and send; the chunks are on their way when this returns.

    Args:
        op: the function's name, for messages.
        input: ``[T, H]``.
        plan: the routing of its tokens.
        groups: one, or those across and within nodes.
        grads: whether gradients will be asked for; ``None`` looks.
        chunks: parts into which the tokens are cut.
        reduce: where results are summed.
        payload: ``"float8"`` or ``None``.
        max_rows: rows of the result (over nodes: of the first exchange), or ``None`` for those that
            arrive.
    """
    check_together(op, input, plan, groups, chunks, reduce, payload, max_rows)
    faults = _faults(plan)
    if input.device.type == "cpu" and bool(faults):
        _tell(op, groups, input.device, bad_plan(op), BAD_PLAN)
        raise bad_plan(op)
    if grads is None:
        grads = wants_gradient(input, plan.probs)
    plans = _cut(plan, chunks)
    parts = input.tensor_split(chunks)
    options: dict[str, Any] = {
        "quantized": payload == "float8",
        "reduce": reduce,
        "grads": grads,
        "num_experts": plan.num_experts,
        "dropped": plan.num_dropped,
        "faults": faults,
        "max_rows": max_rows,
    }
    if len(groups) == 1:
        straight = [
            Departure(part, each, Route(each, each.positions, each.expert_ids))
            for part, each in zip(parts, plans, strict=True)
        ]
        travels = depart(op, straight, groups[0], **options)
        connect(groups, input.device)
        return [Flat(travel) for travel in travels]
    across, within = groups
    nodes = across.size()
    departures = [
        Departure(part, each, route_to_nodes(each, nodes), slots_by_node(each, nodes))
        for part, each in zip(parts, plans, strict=True)
    ]
    try:
        travels = depart(op, departures, across, **options)
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second exchange.
        _tell(op, [within], input.device, error, BETWEEN_NODES)
        raise
    quantized = payload == "float8"
    return [Nodes(op, each, within, quantized=quantized, reduce=reduce) for each in travels]


def check_together(
    op: str,
    input: Any,
    plan: Any,
    groups: Sequence[dist.ProcessGroup],
    chunks: Any,
    reduce: Any,
    payload: Any,
    max_rows: Any,
) -> None:
    """Raise on every rank where shapes or types do not fit on this one."""
    sizes = [each.size() for each in groups]
    try:
        _check_words(op, sizes, chunks, reduce, payload, max_rows)
        _check_tensors(op, input, plan, sizes)
    except (TypeError, ValueError) as problem:
        _tell(op, groups, _device_of_notes(input, groups[0]), problem, None)
        raise


def check_traced(
    op: str,
    input: Any,
    plan: Any,
    groups: Sequence[dist.ProcessGroup],
    chunks: Any,
    reduce: Any,
    payload: Any,
    max_rows: Any,
) -> None:
    """Raise where not even a graph can be made; its operator looks at the rest, on every rank."""
    _check_words(op, [each.size() for each in groups], chunks, reduce, payload, max_rows)
    _check_kinds(op, input, plan)
    if input.dim() != 2:
        checks.fail(op, "input", "of 2 dims, [tokens, hidden_size]", list(input.shape))


def check_call(
    op: str, input: Any, groups: Sequence[dist.ProcessGroup], experts: Any, weighted: Any
) -> None:
    """Raise on every rank where these are no function and no bool on this one."""
    try:
        checks.flag(op, "weighted", weighted)
        if not callable(experts):
            kind = checks.type_name(experts)
            raise TypeError(f"{op}: experts must be a function of rows and plan, got {kind}")
    except TypeError as problem:
        if not torch.compiler.is_compiling():
            _tell(op, groups, _device_of_notes(input, groups[0]), problem, None)
        raise


def _tell(
    op: str,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    problem: Exception,
    complaint: int | None,
) -> None:
    """Make every rank of the groups raise."""
    for group in groups:
        with contextlib.suppress(TypeError, ValueError):
            Agreement(op, group, device, problem=problem, complaint=complaint).wait()


def groups_of(op: str, group: Any) -> list[dist.ProcessGroup]:
    """Return the group, or the groups across and within nodes."""
    if isinstance(group, DeviceMesh):
        if group.ndim not in (1, 2):
            checks.fail(op, "group", "a mesh of 1 or 2 dims", f"{group.ndim} dims")
        return [group.get_group(axis) for axis in range(group.ndim)]
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: group must be a ProcessGroup or DeviceMesh that this rank belongs to,"
            f" got {type(group).__name__}"
        )
    return [group]


def _check_words(
    op: str, sizes: list[int], chunks: Any, reduce: Any, payload: Any, max_rows: Any
) -> None:
    if payload is not None:
        checks.choice(op, "payload", payload, ["float8"])
    checks.choice(op, "reduce", reduce, REDUCTIONS)
    if reduce == "node" and len(sizes) == 1:
        checks.fail(op, "reduce", "'home' where the group is no mesh of 2 dims", "'node'")
    checks.integer(op, "chunks", chunks)
    if not 1 <= chunks <= MAX_CHUNKS:
        checks.fail(op, "chunks", f"from 1 to {MAX_CHUNKS}", chunks)
    if max_rows is not None:
        checks.integer(op, "max_rows", max_rows, least=0)


def _check_kinds(op: str, input: Any, plan: Any) -> None:
    checks.tensor(op, "input", input)
    if not isinstance(plan, RoutingPlan):
        raise TypeError(f"{op}: plan must be a RoutingPlan, got {type(plan).__name__}")


def _check_tensors(op: str, input: Any, plan: Any, sizes: list[int]) -> None:
    _check_kinds(op, input, plan)
    if input.dim() != 2 or input.shape[1] < 1:
        checks.fail(op, "input", "of 2 dims, [tokens, hidden_size]", list(input.shape))
    for name in ("expert_ids", "probs", "permutation", "positions", "offsets"):
        wanted = (torch.float32, torch.float64) if name == "probs" else (torch.int32,)
        checks.index_tensor(op, f"plan.{name}", getattr(plan, name), dtypes=wanted)
        device = getattr(plan, name).device
        if device != input.device:
            checks.fail(op, f"plan.{name}", f"on {input.device}, the device of input", device)
    if plan.positions.dim() != 2:
        checks.fail(op, "plan.positions", "of 2 dims", list(plan.positions.shape))
    if plan.num_tokens != input.shape[0]:
        checks.fail(
            op, "plan", f"of the {input.shape[0]} tokens of input", f"one of {plan.num_tokens}"
        )
    slots = (plan.num_tokens, plan.top_k)
    checks.shape(op, "plan.expert_ids", plan.expert_ids, slots, "that of positions")
    checks.shape(op, "plan.probs", plan.probs, slots, "that of positions")
    checks.shape(op, "plan.permutation", plan.permutation, (slots[0] * slots[1],), "a row a slot")
    checks.shape(op, "plan.offsets", plan.offsets, (plan.num_experts,), "one per expert")
    size = math.prod(sizes)
    if plan.num_experts % size != 0:
        checks.fail(
            op, "group", f"of a size that divides the plan's {plan.num_experts} experts", size
        )


def _device_of_notes(input: Any, group: dist.ProcessGroup) -> torch.device:
    """Return where notes of a rank whose arguments may be anything are made."""
    if isinstance(input, torch.Tensor) and input.device.type in ("cpu", "cuda"):
        return input.device
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _faults(plan: RoutingPlan) -> torch.Tensor:
    """Return 1 where ids or offsets are out of range, else 0, without waiting for the device."""
    slots, ends = plan.permutation.numel(), plan.offsets
    steps = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), slots))
    wrong = (steps < 0).any()
    if slots > 0:
        for values, last in (
            (plan.expert_ids, plan.num_experts),
            (plan.permutation, slots - 1),
            (plan.positions, slots - 1),
        ):
            low, high = values.aminmax()
            wrong = wrong | (low < 0) | (high > last)
    return wrong.to(torch.int32)


def _cut(plan: RoutingPlan, chunks: int) -> list[RoutingPlan]:
    """Return the plans of consecutive parts of the tokens."""
    if chunks == 1:
        return [plan]
    kept = plan.positions < plan.offsets[-1]
    ids = torch.where(kept, plan.expert_ids, plan.num_experts).tensor_split(chunks)
    probs = plan.probs.tensor_split(chunks)
    return [
        RoutingPlan(i, p, *moe_sort(i, plan.num_experts), k, plan.num_experts, plan.capacity)
        for i, p, k in zip(ids, probs, kept.tensor_split(chunks), strict=True)
    ]
