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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.ops import RoutingPlan
from fusedops.ops._weight_gradients import summed
from fusedops.parallel.expert import traced
from fusedops.parallel.expert.dispatcher import (
    Group,
    check_call,
    check_together,
    check_traced,
    groups_of,
    start,
)
from fusedops.parallel.expert.flat import Flat, FlatReturn
from fusedops.parallel.expert.hierarchical import Nodes, NodesReturn

Experts = Callable[[torch.Tensor, RoutingPlan], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What ``moe_combine`` needs to send results back, and what the exchange counted.

    Over a mesh of two dimensions the rows are those of the first exchange, between nodes. In a
    compiled graph, and with ``max_rows``, the counts are int64 tensors on the CPU: scalars, and one
    number per rank.

    Attributes:
        plan: the plan of the tokens at home.
        num_dropped: slots of this rank that no expert computes.
        num_dropped_in_group: the same, summed over all ranks.
        rows_sent: packed rows for each rank of the group, or for each node.
        rows_received: packed rows from each.
        row_bytes: bytes of a packed row.
    """

    plan: RoutingPlan
    num_dropped: int | torch.Tensor
    num_dropped_in_group: int | torch.Tensor
    rows_sent: tuple[int, ...] | torch.Tensor
    rows_received: tuple[int, ...] | torch.Tensor
    row_bytes: int
    _way: Flat | Nodes | traced.Way


def moe_dispatch(
    input: torch.Tensor,
    plan: RoutingPlan,
    group: Group,
    *,
    reduce: str = "home",
    payload: str | None = None,
    max_rows: int | None = None,
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
        max_rows: makes ``R`` this number, the same on every rank, whatever arrives: shapes are
            static then. Rows behind those that arrived are zeros, and nobody's in ``local_plan``.
            ``None`` takes what arrives. Over a mesh of two dimensions neither exchange brings a
            rank more.

    Returns:
        ``(rows, local_plan, handle)``: ``rows`` ``[R, H]`` of all ranks for the experts here, dtype
        of ``input``, a strided view of what arrived; their routing over the ``E / G`` experts here,
        one slot per row, with the probabilities; what ``moe_combine`` needs. ``R`` may be 0.

    Raises:
        ValueError: a shape, a group's size, an id or an offset does not fit, or more than
            ``max_rows`` rows would arrive, on any rank: every rank raises, with the reason on the
            one that has it. So do ranks that disagree.
        TypeError: the same for a wrong type; the other ranks raise ValueError.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        Two collectives: the counts (a note of fixed size) and one payload of bytes in which each
        row is followed by its probability and expert id. Backwards one: gradients of rows and
        probabilities in one payload. The host waits for the device once, for the counts, while
        rows are packed; with groups of NCCL alone the first call makes connections between hosts
        as well. Over two dimensions of a mesh all of this happens twice. Differentiable once in
        ``input`` and ``plan.probs``. ``max_rows`` costs another collective, of one number per pair
        of ranks; over two dimensions of a mesh three.

        Under ``torch.compile`` this is an operator, over two dimensions of a mesh two of them, with
        the same bits: ``R`` is a symbol, or ``max_rows``. Symbols need ``fullgraph=True`` or
        ``torch._dynamo.config.capture_dynamic_output_shape_ops``; without, a graph ends here and
        another begins behind.

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
    op = "moe_dispatch"
    groups = groups_of(op, group)
    if _as_operators(max_rows):
        return _send(op, input, plan, groups, 1, reduce, payload, max_rows)
    return _dispatch(input, plan, groups, reduce, payload)


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
        ValueError: ``output`` does not fit the rows, on any rank: every rank raises, with the
            reason on the one that has it; also on GPUs.
        TypeError: it is no tensor, or of another dtype; the other ranks raise ValueError.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        One collective for the rows and one for the word that all could send; one backwards. Over
        two dimensions of a mesh all of this happens twice. The word passes between hosts while
        rows travel, and no host waits for its device: over the group itself where it takes CPU
        tensors, else (NCCL alone) over connections of gloo, which the first ``moe_dispatch`` made.
        Where gloo cannot connect (a warning says so) a wrong ``output`` raises on its own rank
        only, and the others wait for the timeout. Rows return to the
        places of their slots and are summed there in float32, rounded once: the same bits for any
        number of ranks.

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
    checks.flag("moe_combine", "weighted", weighted)
    way = handle._way
    if isinstance(way, traced.Way):
        return way.come_home(output, weighted=weighted)
    return _combine(output, way, weighted)


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
    max_rows: int | None = None,
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
        max_rows: as for ``moe_dispatch``; the tokens are not cut then, whatever ``chunks`` says.

    Returns:
        ``[T, H]``, as ``moe_combine``: the same bits for any number of chunks.

    Raises:
        ValueError: as ``moe_dispatch`` and ``moe_combine``, on every rank.
        TypeError: as there.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        One exchange of counts for all chunks, then per chunk the collectives of the two functions.
        In a compiled graph the tokens are not cut: the operators wait inside, and nothing would
        overlap.

        With chunks a weight gets a gradient from each. Those of half-precision weights and biases
        that ``moe_mlp`` and ``grouped_mm`` read in ``experts`` are summed in float32 and rounded
        once, as without chunks: only the order of that sum depends on them. It takes 4 bytes per
        number of these weights while their backward runs. Under autocast the sum is handed to the
        float32 weights as it is. Other operations' gradients, those of weights made anew in each
        call (by a cast or ``torch.cat``), of compiled experts, of weights that are sharded or
        wrapped, and inside of reentrant checkpointing within ``experts`` are added by autograd, in
        the dtype of the weight. Differentiable once, as ``moe_dispatch``.

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
    op = "expert_parallel"
    groups = groups_of(op, group)
    check_call(op, input, groups, experts, weighted)
    if _as_operators(max_rows):
        rows, local_plan, handle = _send(op, input, plan, groups, chunks, reduce, payload, max_rows)
        return moe_combine(experts(rows, local_plan), handle, weighted=weighted)
    return _overlapped(input, plan, experts, groups, chunks, weighted, reduce, payload)


def _as_operators(max_rows: int | None) -> bool:
    """Whether exchanges are to be operators: a compiler is looking, or shapes are static."""
    return max_rows is not None or (torch.compiler.is_compiling() and _takes_symbols())


@torch.compiler.assume_constant_result
def _takes_symbols() -> bool:
    """Whether the compiler that is looking goes on where only the run tells a size."""
    context = torch._guards.TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    shapes = mode.shape_env if mode is not None else None
    return shapes is None or shapes.allow_dynamic_output_shape_ops


def _send(
    op: str,
    input: torch.Tensor,
    plan: RoutingPlan,
    groups: list[dist.ProcessGroup],
    chunks: int,
    reduce: str,
    payload: str | None,
    max_rows: int | None,
) -> tuple[torch.Tensor, RoutingPlan, Dispatched]:
    check = check_traced if torch.compiler.is_compiling() else check_together
    check(op, input, plan, groups, chunks, reduce, payload, max_rows)
    rows, local_plan, mine, dropped, row_bytes, way = traced.send(
        op, input, plan, groups, reduce, payload, max_rows
    )
    sent, received = way.counts[0], way.counts[1]
    return rows, local_plan, Dispatched(plan, mine, dropped, sent, received, row_bytes, way)


@torch.compiler.disable(reason="row counts of an expert-parallel exchange live on the host")
def _dispatch(
    input: torch.Tensor,
    plan: RoutingPlan,
    groups: list[dist.ProcessGroup],
    reduce: str,
    payload: str | None,
) -> tuple[torch.Tensor, RoutingPlan, Dispatched]:
    (way,) = start("moe_dispatch", input, plan, groups, reduce=reduce, payload=payload)
    way.relay()
    return _arrive(way)


@torch.compiler.disable(reason="row counts of an expert-parallel exchange live on the host")
def _combine(output: torch.Tensor, way: Flat | Nodes, weighted: bool) -> torch.Tensor:
    return way.send_back(output).come_home(weighted=weighted)


@torch.compiler.disable(reason="row counts of an expert-parallel exchange live on the host")
def _overlapped(
    input: torch.Tensor,
    plan: RoutingPlan,
    experts: Experts,
    groups: list[dist.ProcessGroup],
    chunks: int,
    weighted: bool,
    reduce: str,
    payload: str | None,
) -> torch.Tensor:
    options: dict[str, Any] = {"weighted": weighted, "reduce": reduce, "payload": payload}
    trip = Trip(input, plan, experts, groups, chunks=chunks, **options)
    trip.compute()
    return trip.come_home()


class Trip:
    """``expert_parallel`` in steps, between which a caller may compute something else.

    The tokens are on their way when it is made. Arguments are those of ``expert_parallel``; it is
    never part of a compiled graph.
    """

    def __init__(
        self,
        input: torch.Tensor,
        plan: RoutingPlan,
        experts: Experts,
        group: Group | list[dist.ProcessGroup],
        *,
        chunks: int = 1,
        weighted: bool = False,
        reduce: str = "home",
        payload: str | None = None,
    ) -> None:
        op = "expert_parallel"
        groups = group if isinstance(group, list) else groups_of(op, group)
        options: dict[str, Any] = {"chunks": chunks, "reduce": reduce, "payload": payload}
        self._ways = start(op, input, plan, groups, **options)
        self._experts, self._weighted = experts, weighted
        self._relayed = 0
        self._returning: list[FlatReturn | NodesReturn] = []

    def relay(self) -> None:
        """Send on what has come to this node; ``compute`` does so where nobody did before."""
        if self._relayed < len(self._ways):
            self._ways[self._relayed].relay()
            self._relayed += 1

    def compute(self) -> None:
        """Let the experts here compute what has come; the results are on their way then."""
        if not self._relayed:
            self.relay()
        returning, weighted = self._returning, self._weighted
        with summed(len(self._ways) > 1):
            for i, way in enumerate(self._ways):
                self.relay()
                rows, local_plan, _ = _arrive(way)
                returning.append(way.send_back(self._experts(rows, local_plan)))
                if i > 0:
                    returning[i - 1].relay(weighted=weighted)
        returning[-1].relay(weighted=weighted)

    def come_home(self) -> torch.Tensor:
        """Wait for the results; returns ``[T, H]``."""
        parts = [each.come_home(weighted=self._weighted) for each in self._returning]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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
