"""Expert parallelism: dispatch tokens to the ranks of their experts, and combine the results.

    rows, local_plan, handle = moe_dispatch(input, plan, group)
    output = moe_combine(experts(rows, local_plan), handle)

Experts are sharded in order: of ``E`` experts on ``G`` ranks, rank ``r`` has ``E / G`` from ``r * E
/ G`` on. Rows arrive ordered by rank of origin, expert and token. Sorted by expert they have the
order of one process with all tokens, and the rank of the token sums its slots in their order. Hence
the same bits for any number of ranks. docs/expert_parallel.md has a diagram.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import checks
from fusedops.ops import RoutingPlan
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.ops._weight_gradients import summed
from fusedops.parallel.expert.arguments import (
    DispatchOptions,
    Group,
    check_on_all,
    check_traced,
    groups_of,
)
from fusedops.parallel.expert.dispatcher import PendingCombine, TokenDispatcher, start_tokens

Experts = Callable[[torch.Tensor, RoutingPlan], torch.Tensor]
_HOST = "row counts of an expert-parallel exchange are on the host"


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What ``moe_combine`` needs to send results back, and the counts of the exchange.

    Over a mesh of two dimensions the rows are those of the exchange between nodes. In a compiled
    graph the counts are int64 tensors on the CPU: scalars, and one number per rank.
    """

    plan: RoutingPlan  # of the tokens of this rank
    num_dropped: int | torch.Tensor  # slots of this rank that no expert computes
    num_dropped_in_group: int | torch.Tensor  # the same, summed over all ranks
    # Packed rows for each rank of the group, or for each node, and from each
    rows_sent: tuple[int, ...] | torch.Tensor
    rows_received: tuple[int, ...] | torch.Tensor
    row_bytes: int  # of a packed row
    _dispatcher: TokenDispatcher


def moe_dispatch(
    input: torch.Tensor,
    plan: RoutingPlan,
    group: Group,
    *,
    reduce: str = "source",
    payload: str | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, RoutingPlan, DispatchHandle]:
    """Send each token to the ranks of its experts.

    Args:
        input: ``[T, H]``, any floating dtype; ``T`` may differ between ranks and be 0.
        plan: the routing of these tokens over all ``E`` experts of the group.
        group: the ranks that share the experts, gloo or NCCL: a process group or a mesh of one
            dimension, whose size divides ``E``; or a mesh of two, ``[nodes, ranks of a node]``: a
            token then goes to each node once, and from there to its experts.
        reduce: where a token's slots are summed: ``"source"``: all on the rank of the token; or,
            over a mesh of two dimensions, ``"node"``: those of a node there, so that one row per
            token and node returns. That sum is rounded to the dtype of the rows, and the result has
            other bits than one process.
        payload: ``"float8"`` sends rows as e4m3 with a power-of-two scale per row (gradients are
            sent in the dtype of ``input``); ``None`` sends them unchanged.
        validate: makes every rank raise in ``moe_combine`` if the output of one's experts does not
            fit, by a collective for which the host waits: for the first step of a program, or to
            search for an error. ``False``: that rank alone raises, and the others reach the timeout
            of the group. A compiled graph ignores it: the output is checked while the graph is
            made, and its number of rows when it runs, on that rank alone.

    Returns:
        ``(rows, local_plan, handle)``: ``rows`` ``[R, H]`` from all ranks for the experts here,
        dtype of ``input``, a strided view of the receive buffer; their routing over the ``E / G``
        experts here, one slot per row, with the probabilities; the handle for ``moe_combine``.
        ``R`` may be 0.

    Raises:
        ValueError: a shape, a group's size, an id or an offset does not fit on any rank: every rank
            raises, with the reason on the one that has it. So do ranks that disagree.
        TypeError: the same for a wrong type; the other ranks raise ValueError.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        Two collectives: the metadata (a message of fixed size) and one payload of bytes in which
        each row is followed by its probability and expert id. One in the backward: gradients of
        rows and probabilities in one payload. The host waits for the device once, for the metadata,
        while rows are packed. Over a mesh of two dimensions all of this happens twice.
        Differentiable once in ``input`` and ``plan.probs``.

        Under ``torch.compile`` this is an operator, over a mesh of two dimensions two of them, with
        the same bits. ``R`` is a symbol, which needs ``fullgraph=True`` or
        ``torch._dynamo.config.capture_dynamic_output_shape_ops``; otherwise the graph breaks.

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
    groups = groups_of("moe_dispatch", group)
    options = DispatchOptions("moe_dispatch", groups, reduce, payload, validate=validate)
    return _dispatch(options, input, plan)


def moe_combine(
    output: torch.Tensor, handle: DispatchHandle, *, weighted: bool = False
) -> torch.Tensor:
    """Send the experts' results back and sum them for each token.

    ``combined[t] = sum_j p[t, j] * result of slot j``, over the slots that were kept, in order.

    Args:
        output: ``[R, H]``, the result of each row of ``moe_dispatch``, in its order and dtype.
        handle: returned by that call.
        weighted: multiply by ``handle.plan.probs`` in the sum. ``False`` (default) if the experts
            did so already, as ``moe_mlp`` does with the probabilities of ``local_plan``.

    Returns:
        ``[T, H]``, dtype of ``output``; 0 for a token without a kept slot.

    Raises:
        ValueError: ``output`` does not fit the rows. With ``validate`` of the dispatch every rank
            raises, with the reason on the one that has it.
        TypeError: it is no tensor, or of another dtype; with ``validate`` the others raise
            ValueError.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        One collective for the rows; one in the backward. Over a mesh of two dimensions two of each.
        ``validate`` adds one of a number per pair of ranks, for which the host waits. Rows return
        to the positions of their slots and are summed there in float32, rounded once: the same bits
        for any number of ranks.

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
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"moe_combine: handle must be of moe_dispatch, got {type(handle).__name__}")
    checks.flag("moe_combine", "weighted", weighted)
    combine = _combine if handle._dispatcher.is_traced else _combine_outside_of_graphs
    return combine(handle._dispatcher, output, weighted)


def expert_parallel(
    input: torch.Tensor,
    plan: RoutingPlan,
    experts: Experts,
    group: Group,
    *,
    chunks: int = 1,
    weighted: bool = False,
    reduce: str = "source",
    payload: str | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """Dispatch, compute and combine, with exchange and computation overlapped.

    The tokens are split into ``chunks`` parts, all of which are sent at once. While the experts
    compute one part, later parts arrive and earlier results travel back. The backward overlaps in
    the reverse order.

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
        validate: as for ``moe_dispatch``.

    Returns:
        ``[T, H]``, as ``moe_combine``: the same bits for any number of chunks.

    Raises:
        ValueError: as ``moe_dispatch`` and ``moe_combine``.
        TypeError: as there.
        RuntimeError: a rank or a link failed; within the group's timeout.

    Note:
        One exchange of metadata for all chunks, then per chunk the collectives of ``moe_dispatch``
        and ``moe_combine``. In a compiled graph the tokens are not split: the operators wait
        inside, and nothing would overlap.

        With chunks a weight gets a gradient from each. Gradients of half-precision weights and
        biases that ``moe_mlp`` and ``grouped_mm`` read in ``experts`` are summed in float32 and
        rounded once, as without chunks: only the order of that sum depends on ``chunks``. It takes
        4 bytes per element of these weights while their backward runs. Under autocast the sum is
        passed to the float32 weights without rounding. Autograd adds, in the dtype of the weight,
        the gradients of other operations, of weights that each call creates (by a cast or
        ``torch.cat``), of compiled experts, of sharded or wrapped weights, and those inside of
        reentrant checkpointing within ``experts``. Differentiable once, as ``moe_dispatch``.

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
    options = DispatchOptions(op, groups_of(op, group), reduce, payload, chunks, validate)
    checks.flag(op, "weighted", weighted)
    if not callable(experts):
        checks.fail_type(op, "experts", "a function of rows and plan", experts)
    if chunks != 1 and not _is_traceable():
        return _in_chunks(options, input, plan, experts, weighted)
    rows, local_plan, handle = _dispatch(options, input, plan)
    return moe_combine(experts(rows, local_plan), handle, weighted=weighted)


def _is_traceable() -> bool:
    """Whether a graph is made, and may contain the exchanges."""
    return torch.compiler.is_compiling() and _takes_symbols()


@torch.compiler.assume_constant_result
def _takes_symbols() -> bool:
    """Whether the compiler continues its graph after a size that is known at run time only."""
    context = torch._guards.TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    shapes = mode.shape_env if mode is not None else None
    return shapes is None or shapes.allow_dynamic_output_shape_ops


def _dispatch(
    options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan
) -> tuple[torch.Tensor, RoutingPlan, DispatchHandle]:
    dispatch = _dispatch_by_operators if _is_traceable() else _dispatch_outside_of_graphs
    return dispatch(options, input, plan)


def _dispatch_by_operators(
    options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan
) -> tuple[torch.Tensor, RoutingPlan, DispatchHandle]:
    is_traced = torch.compiler.is_compiling()
    check = check_traced if is_traced else check_on_all
    check(options, input, plan)
    (dispatcher,) = start_tokens(options, input, plan, in_steps=False)
    rows, local_plan = dispatcher.wait_tokens()
    first, last = (hop.results() for hop in (dispatcher.hops[0], dispatcher.hops[-1]))
    own: Any = first.dropped[options.groups[0].rank()]
    total: Any = last.dropped.sum()
    sent: Any = first.counts[0]
    received: Any = first.counts[1]
    if not is_traced:
        own, total = int(own), int(total)
        sent, received = (tuple(counts.tolist()) for counts in (sent, received))
    pairs = plan.top_k if len(options.groups) > 1 else 1
    layout = PayloadLayout(input.shape[1], input.dtype, plan.probs.dtype, pairs, options.quantized)
    handle = DispatchHandle(plan, own, total, sent, received, layout.stride, dispatcher)
    return rows, local_plan, handle


def _combine(dispatcher: TokenDispatcher, output: torch.Tensor, weighted: bool) -> torch.Tensor:
    return dispatcher.combine_start(output, weighted=weighted).wait()


@torch.compiler.disable(reason=_HOST)
def _in_chunks(
    options: DispatchOptions,
    input: torch.Tensor,
    plan: RoutingPlan,
    experts: Experts,
    weighted: bool,
) -> torch.Tensor:
    call = StagedExpertParallel(options, input, plan, experts, weighted=weighted)
    call.compute()
    return call.combine_wait()


_dispatch_outside_of_graphs = torch.compiler.disable(_dispatch_by_operators, reason=_HOST)
_combine_outside_of_graphs = torch.compiler.disable(_combine, reason=_HOST)


class StagedExpertParallel:
    """``expert_parallel`` in steps, between which a caller may compute something else.

    The constructor starts to send the tokens. It is never part of a compiled graph.
    """

    def __init__(
        self,
        options: DispatchOptions,
        input: torch.Tensor,
        plan: RoutingPlan,
        experts: Experts,
        *,
        weighted: bool = False,
    ) -> None:
        self._dispatchers = start_tokens(options, input, plan, in_steps=True)
        self._experts, self._weighted = experts, weighted
        self._next = 0
        self._pending: list[PendingCombine] = []

    def second_hop(self) -> None:
        """Start the second hop of the next chunk; ``compute`` does so for all that remain."""
        if self._next < len(self._dispatchers):
            self._dispatchers[self._next].second_hop()
            self._next += 1

    def compute(self) -> None:
        """Run the experts on the tokens that arrive, and start to send their results back."""
        if self._next == 0:
            self.second_hop()
        pending = self._pending
        with summed(len(self._dispatchers) > 1):
            for i, dispatcher in enumerate(self._dispatchers):
                self.second_hop()
                output = self._experts(*dispatcher.wait_tokens())
                pending.append(dispatcher.combine_start(output, weighted=self._weighted))
                if i > 0:
                    pending[i - 1].second_hop()
        pending[-1].second_hop()

    def combine_wait(self) -> torch.Tensor:
        """Wait for the results; returns ``[T, H]``."""
        parts = [chunk.wait() for chunk in self._pending]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
