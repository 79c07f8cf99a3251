"""Expert parallelism: tokens to the ranks of their experts, and the experts' results back.

    rows, local_plan, handle = moe_dispatch(input, plan, group)
    output = moe_combine(experts(rows, local_plan), handle)

Experts are sharded in order: of ``E`` experts on ``G`` ranks, rank ``r`` has ``E / G`` from ``r * E
/ G`` on. Rows arrive ordered by rank of origin, expert and token: sorted by expert they stand as
one process with all tokens would have them, and the sum over a token's slots is made at home, in
the order of the slots. Hence the same bits for any number of ranks. docs/expert_parallel.md has a
picture.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_sort
from fusedops.parallel._agreement import BAD_PLAN, MAX_CHUNKS, REDUCTIONS, Agreement, bad_plan
from fusedops.parallel._flat import Departure, Flat, FlatReturn, depart
from fusedops.parallel._hops import Route
from fusedops.parallel._nodes import Nodes, NodesReturn, departure_to_nodes

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"
Experts = Callable[[torch.Tensor, RoutingPlan], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What ``moe_combine`` needs to send results back, and what the exchange counted.

    Over a mesh of two dimensions the rows are those of the first exchange, between nodes.

    Attributes:
        plan: the plan of the tokens at home.
        num_dropped: slots of this rank that no expert computes.
        num_dropped_in_group: the same, summed over all ranks.
        rows_sent: packed rows for each rank of the group, or for each node.
        rows_received: packed rows from each.
        row_bytes: bytes of a packed row.
    """

    plan: RoutingPlan
    num_dropped: int
    num_dropped_in_group: int
    rows_sent: tuple[int, ...]
    rows_received: tuple[int, ...]
    row_bytes: int
    _way: Flat | Nodes


@torch.compiler.disable(reason="row counts of an expert-parallel exchange live on the host")
def moe_dispatch(
    input: torch.Tensor,
    plan: RoutingPlan,
    group: Group,
    *,
    reduce: str = "home",
    payload: str | None = None,
) -> tuple[torch.Tensor, RoutingPlan, Dispatched]:
    """Send each token to the ranks of its experts.

    Args:
        input: ``[T, H]``, any floating dtype; ``T`` may differ between ranks and be 0.
        plan: the routing of these tokens over all ``E`` experts of the group.
        group: the ranks that share the experts, gloo or NCCL: a process group or a mesh of one
            dimension, whose size divides ``E``; or a mesh of two, ``[nodes, ranks of a node]``: a
            token then goes to each node once, and from there to its experts.
        reduce: where a token's slots are summed: ``"home"``, all of them; or, over a mesh of two
            dimensions, ``"node"``: those of a node there, so that one row per token and node
            travels back. It is rounded to the dtype of the rows, and the result has other bits
            than one process.
        payload: ``"float8"`` sends rows as e4m3 with a power-of-two scale per row (gradients travel
            in the dtype of ``input``); ``None`` sends them as they are.

    Returns:
        ``(rows, local_plan, handle)``: ``rows`` ``[R, H]`` of all ranks for the experts here, dtype
        of ``input``, a strided view of what arrived; their routing over the ``E / G`` experts here,
        one slot per row, with the probabilities; what ``moe_combine`` needs. ``R`` may be 0.

    Raises:
        ValueError: a shape, a group's size, an id or an offset does not fit, on any rank: every
            rank raises, with the reason on the one that has it. So do ranks that disagree.
        TypeError: the same for a wrong type; the other ranks raise ValueError.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        Two collectives: the counts (a note of fixed size) and one payload of bytes in which each
        row is followed by its probability and expert id. Backwards one: gradients of rows and
        probabilities in one payload. The host waits for the device once, for the counts, while
        rows are packed. Over two dimensions of a mesh all of this happens twice. Differentiable
        once in ``input`` and ``plan.probs``. Under ``torch.compile`` a
        graph ends here and another begins behind: the number of rows is known on the host only.

    Reference:
        Lepikhin et al.: GShard, arXiv:2006.16668. DeepSeek-V3, arXiv:2412.19437 (float8 dispatch).

    Example:
        >>> import torch, fusedops, torch.distributed as dist
        >>> from fusedops.parallel import moe_combine, moe_dispatch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, probs = torch.tensor([[1.0], [2.0]]), torch.ones(2, 1)
        >>> plan = fusedops.RoutingPlan.from_choices(torch.tensor([[1], [0]]), probs, 2)
        >>> rows, local_plan, handle = moe_dispatch(x, plan, dist.group.WORLD)
        >>> moe_combine(10 * rows, handle).tolist()
        [[10.0], [20.0]]
        >>> dist.destroy_process_group()
    """
    (way,) = _depart("moe_dispatch", input, plan, group, 1, reduce, payload)
    way.relay()
    return _arrive(way)


@torch.compiler.disable(reason="row counts of an expert-parallel exchange live on the host")
def moe_combine(
    output: torch.Tensor, handle: Dispatched, *, weighted: bool = False
) -> torch.Tensor:
    """Send the experts' results back and sum them for each token.

    ``combined[t] = sum_j p[t, j] * result of slot j``, over the slots that were kept, in order.

    Args:
        output: ``[R, H]``, the result of each row of ``moe_dispatch``, in its order and dtype.
        handle: of that call.
        weighted: multiply by ``handle.plan.probs`` at home. ``False`` (default) where the experts
            did so already, as ``moe_mlp`` does with the probabilities of ``local_plan``.

    Returns:
        ``[T, H]``, dtype of ``output``; 0 for a token without a kept slot.

    Raises:
        ValueError: ``output`` does not fit the rows; on CPU ranks all raise, on CUDA (where looking
            would wait for the device) only this one.
        TypeError: it is no tensor, or of another dtype.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        One collective for the rows and, on CPU ranks, one for the word that all could send; one
        backwards. Rows return to the places of their slots and are summed there in float32, rounded
        once: the same bits for any number of ranks.

    Example:
        >>> import torch, fusedops, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ids, probs = torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.5]])
        >>> plan = fusedops.RoutingPlan.from_choices(ids, probs, 2)
        >>> dispatch, combine = fusedops.parallel.moe_dispatch, fusedops.parallel.moe_combine
        >>> rows, _, handle = dispatch(torch.tensor([[8.0]]), plan, dist.group.WORLD)
        >>> combine(rows, handle, weighted=True)
        tensor([[6.]])
        >>> dist.destroy_process_group()
    """
    if not isinstance(handle, Dispatched):
        raise TypeError(f"moe_combine: handle must be of moe_dispatch, got {type(handle).__name__}")
    return handle._way.send_back(output).come_home(weighted=weighted)


@torch.compiler.disable(reason="row counts of an expert-parallel exchange live on the host")
def expert_parallel(
    input: torch.Tensor,
    plan: RoutingPlan,
    experts: Experts,
    group: Group,
    *,
    chunks: int = 1,
    weighted: bool = False,
    reduce: str = "home",
    payload: str | None = None,
) -> torch.Tensor:
    """Dispatch, compute and combine, with exchange and computation overlapped.

    The tokens are cut into ``chunks`` parts. All are sent at once; while the experts compute one
    part, later parts arrive and earlier results travel back. Backwards the same in reverse.

    Args:
        input: ``[T, H]``, as for ``moe_dispatch``.
        plan: as for ``moe_dispatch``.
        experts: ``experts(rows, local_plan) -> [R, H]``, called once per chunk; the result of a row
            must depend on that row alone.
        group: as for ``moe_dispatch``.
        chunks: 1 to 8, the same on every rank.
        weighted: as for ``moe_combine``.
        reduce: as for ``moe_dispatch``.
        payload: as for ``moe_dispatch``.

    Returns:
        ``[T, H]``, as ``moe_combine``: the same bits for any number of chunks.

    Raises:
        ValueError: as ``moe_dispatch`` and ``moe_combine``, on every rank.
        TypeError: as there.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        One exchange of counts for all chunks, then per chunk the collectives of the two functions.

    Example:
        >>> import torch, fusedops, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> plan = fusedops.RoutingPlan.from_choices(torch.tensor([[1], [0]]), torch.ones(2, 1), 2)
        >>> double = lambda rows, local_plan: 2 * rows
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> fusedops.parallel.expert_parallel(x, plan, double, dist.group.WORLD, chunks=2)
        tensor([[2.],
                [4.]])
        >>> dist.destroy_process_group()
    """
    ways = _depart("expert_parallel", input, plan, group, chunks, reduce, payload)
    ways[0].relay()
    returning: list[FlatReturn | NodesReturn] = []
    for i, way in enumerate(ways):
        if i + 1 < len(ways):
            ways[i + 1].relay()
        rows, local_plan, _ = _arrive(way)
        returning.append(way.send_back(experts(rows, local_plan)))
        if i > 0:
            returning[i - 1].relay(weighted=weighted)
    returning[-1].relay(weighted=weighted)
    parts = [each.come_home(weighted=weighted) for each in returning]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _depart(
    op: str,
    input: torch.Tensor,
    plan: RoutingPlan,
    group: Group,
    chunks: int,
    reduce: str,
    payload: str | None,
) -> Sequence[Flat | Nodes]:
    """Check, agree, pack and send; the chunks are on their way when this returns."""
    groups = _groups(op, group)
    sizes = [each.size() for each in groups]
    problem: Exception | None = None
    complaint = None
    try:
        _check(op, input, plan, sizes, chunks, reduce, payload)
        faults = _faults(plan)
        if input.device.type == "cpu" and bool(faults):
            problem, complaint = bad_plan(op), BAD_PLAN
    except (TypeError, ValueError) as error:
        problem = error
    if problem is not None:
        _tell(op, groups, _device_of_notes(input, groups[0]), problem, complaint)
        raise problem
    plans = _cut(plan, chunks)
    parts = input.tensor_split(chunks)
    common: dict[str, Any] = {
        "quantized": payload == "float8",
        "reduce": reduce,
        "num_experts": plan.num_experts,
        "dropped": plan.num_dropped,
        "faults": faults,
    }
    if len(groups) == 1:
        straight = [
            Departure(part, each, Route(each, each.positions, each.expert_ids))
            for part, each in zip(parts, plans, strict=True)
        ]
        return [Flat(travel) for travel in depart(op, straight, groups[0], **common)]
    across, within = groups
    departures = [
        departure_to_nodes(part, each, across.size())
        for part, each in zip(parts, plans, strict=True)
    ]
    try:
        travels = depart(op, departures, across, **common)
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second exchange.
        _tell(op, [within], input.device, error, None)
        raise
    quantized = payload == "float8"
    return [Nodes(op, each, within, quantized=quantized, reduce=reduce) for each in travels]


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


def _arrive(way: Flat | Nodes) -> tuple[torch.Tensor, RoutingPlan, Dispatched]:
    rows, local_plan = way.arrive()
    counted = way.travel.rows
    handle = Dispatched(
        way.travel.departure.plan,
        *way.num_dropped,
        tuple(counted.send),
        tuple(counted.receive),
        way.travel.row_bytes,
        way,
    )
    return rows, local_plan, handle


def _groups(op: str, group: Any) -> list[dist.ProcessGroup]:
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


def _check(
    op: str, input: Any, plan: Any, sizes: list[int], chunks: Any, reduce: Any, payload: Any
) -> None:
    checks.tensor(op, "input", input)
    if not isinstance(plan, RoutingPlan):
        raise TypeError(f"{op}: plan must be a RoutingPlan, got {type(plan).__name__}")
    if payload is not None:
        checks.choice(op, "payload", payload, ["float8"])
    checks.choice(op, "reduce", reduce, REDUCTIONS)
    if reduce == "node" and len(sizes) == 1:
        checks.fail(op, "reduce", "'home' where the group is no mesh of 2 dims", "'node'")
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"{op}: chunks must be an int, got {type(chunks).__name__}")
    if not 1 <= chunks <= MAX_CHUNKS:
        checks.fail(op, "chunks", f"from 1 to {MAX_CHUNKS}", chunks)
    if input.dim() != 2 or input.shape[1] < 1:
        checks.fail(op, "input", "of 2 dims, [tokens, hidden_size]", list(input.shape))
    if plan.num_tokens != input.shape[0]:
        checks.fail(
            op, "plan", f"of the {input.shape[0]} tokens of input", f"one of {plan.num_tokens}"
        )
    for name in ("expert_ids", "probs", "permutation", "positions", "offsets"):
        device = getattr(plan, name).device
        if device != input.device:
            checks.fail(op, f"plan.{name}", f"on {input.device}, the device of input", device)
        wanted = [torch.float32, torch.float64] if name == "probs" else [torch.int32]
        if getattr(plan, name).dtype not in wanted:
            shown = " or ".join(str(each).removeprefix("torch.") for each in wanted)
            raise TypeError(f"{op}: plan.{name} must be {shown}, got {getattr(plan, name).dtype}")
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
