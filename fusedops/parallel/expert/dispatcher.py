"""The token dispatcher: tokens to the ranks of their experts, and the experts' results back.

``TokenDispatcher`` has the steps of dispatch and combine, over one group or, hierarchically, over
two. A step is one exchange over one group, a *hop*, of which there are two kinds. Compiled graphs,
and calls with a static number of rows, use ``OperatorHop`` (``operators.py``): an operator that
starts and waits at once. All other calls use ``EagerHop``, for the sake of chunks: it starts and
waits in separate steps, so that the experts compute one chunk while later chunks arrive and earlier
results travel back. The operators run an ``EagerHop`` inside.

An error of one rank is sent to all before that rank raises, so that none waits for rows that never
come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.collective_errors import ErrorCode, ErrorVote
from fusedops.parallel.comm.host_groups import connect, hosts_of
from fusedops.parallel.expert.all_to_all import (
    CombineAllToAll,
    DispatchAllToAll,
    RowLimit,
    SendOrder,
)
from fusedops.parallel.expert.arguments import DispatchOptions, check_on_all
from fusedops.parallel.expert.hierarchical import (
    order_to_nodes,
    plan_in_node,
    slots_by_node,
    slots_in_order,
)
from fusedops.parallel.expert.metadata import (
    CallSignature,
    Metadata,
    MetadataExchange,
    RowCounts,
    bad_plan,
    send_error,
)


class DispatchedRows(NamedTuple):
    """What a hop brings: ``rows`` ``[R, H]``, and ``probs`` and ``ids``, ``[R, pairs]``.

    Ids count from 0 for the first expert of the rank (of the node, before the second hop); their
    number stands for no expert.
    """

    rows: torch.Tensor
    probs: torch.Tensor
    ids: torch.Tensor


class PendingRows(Protocol):
    """Results on their way back over one group."""

    def wait(self) -> torch.Tensor:
        """Return the results in the order in which the rows were dispatched."""


class Hop(Protocol):
    """An exchange of rows over one group, started, and the exchange of results in reverse.

    Attributes:
        plan: the routing of the tokens that it sends.
    """

    plan: RoutingPlan

    @property
    def origin_plan(self) -> RoutingPlan:
        """The routing by which the results that return are summed."""

    @property
    def num_experts(self) -> int:
        """Experts for which a rank of the group receives rows."""

    @property
    def counts(self) -> tuple[Any, Any]:
        """Rows sent to, and received from, each rank."""

    @property
    def num_dropped(self) -> tuple[Any, Any]:
        """Slots that no expert computes, of this rank and of the group."""

    def wait(self) -> DispatchedRows:
        """Return the rows that arrive."""

    def next(self, rows: torch.Tensor, plan: RoutingPlan) -> Hop:
        """Start the hop within the node."""

    def combine_start(self, output: torch.Tensor, order: torch.Tensor | None = None) -> PendingRows:
        """Start the exchange of results: one per row, or in an order one per slot."""


class TokenDispatcher:
    """Dispatch and combine of one chunk of tokens.

    Args:
        options: of the call.
        first: the first hop.
    """

    def __init__(self, options: DispatchOptions, first: Hop) -> None:
        self.hops = [first]
        self.reduce = options.reduce
        self._is_padded = options.max_rows is not None
        self._num_hops = len(options.groups)

    def second_hop(self) -> None:
        """Wait for the tokens of this node, and send them to the ranks of their experts.

        Does nothing over a single group, or if it was called before.
        """
        if len(self.hops) < self._num_hops:
            first = self.hops[0]
            rows, probs, ids = first.wait()
            self.hops.append(first.next(rows, plan_in_node(ids, probs, first.num_experts)))

    def wait_tokens(self) -> tuple[torch.Tensor, RoutingPlan]:
        """Return the rows for the experts of this rank, and their routing over these."""
        self.second_hop()
        last = self.hops[-1]
        rows, probs, ids = last.wait()
        # Padding has no expert; without padding each row has one.
        kept = ids < last.num_experts if self._is_padded else None
        order = moe_sort(ids, last.num_experts)
        return rows, RoutingPlan(ids, probs, *order, kept, last.num_experts)

    def combine_start(self, output: torch.Tensor) -> PendingCombine:
        """Start to send the experts' results back."""
        return PendingCombine(self, output)


class PendingCombine:
    """Results on their way to the ranks of their tokens. The constructor starts the exchange.

    Args:
        dispatcher: brought the rows.
        output: ``[R, H]``, the result of each row.
    """

    def __init__(self, dispatcher: TokenDispatcher, output: torch.Tensor) -> None:
        self._hops = dispatcher.hops
        self._in_node = dispatcher.reduce == "node"
        self._num_waiting = len(self._hops)
        self._pending = self._hops[-1].combine_start(output)

    def second_hop(self, *, weighted: bool) -> None:
        """Wait for the results of this node, and send them to the ranks of their tokens.

        Does nothing over a single group, or if it was called before.
        """
        if self._num_waiting < 2:
            return
        self._num_waiting = 1
        first, second = self._hops
        rows = self._pending.wait()
        if self._in_node:
            rows = moe_unpermute(rows, second.plan, weighted=weighted)
            self._pending = first.combine_start(rows)
        else:
            self._pending = first.combine_start(rows, slots_in_order(second.plan))

    def wait(self, *, weighted: bool) -> torch.Tensor:
        """Return ``[T, H]``, the sum of each token's slots."""
        self.second_hop(weighted=weighted)
        # Sums of a node are weighted already.
        weighted = weighted and not self._in_node
        return moe_unpermute(self._pending.wait(), self._hops[0].origin_plan, weighted=weighted)


class EagerHop:
    """An exchange over one group whose start and wait are separate steps.

    Args:
        options: of the call.
        level: the index of the group in ``options.groups``.
        input: ``[T, H]``.
        plan: the routing of the tokens.
        order: which rows are sent.
        origin_plan: the routing by which the results that return are summed.
    """

    def __init__(
        self,
        options: DispatchOptions,
        level: int,
        input: torch.Tensor,
        plan: RoutingPlan,
        order: SendOrder,
        origin_plan: RoutingPlan,
    ) -> None:
        self.plan, self._origin_plan = plan, origin_plan
        self.input, self.order, self.group = input, order, options.groups[level]
        self._options, self._level = options, level
        self._like = input.detach()[:0]
        self.layout = order.layout(input, quantized=options.quantized)
        self.anchor: Any = None

    @property
    def origin_plan(self) -> RoutingPlan:
        """The routing by which the results that return are summed."""
        return self._origin_plan

    @property
    def _groups(self) -> Sequence[dist.ProcessGroup]:
        """The group, and the one across nodes whose ranks wait for what passes this one."""
        return self._options.groups[self._level :: -1]

    def start(self, metadata: MetadataExchange, chunk: int, anchor: Any = None) -> None:
        """Pack and send the rows."""
        options = self._options
        limit = None
        if options.max_rows is not None:
            limit = RowLimit(options.op, options.max_rows, self._groups)
        self._metadata, self._chunk = metadata, chunk
        self._exchange = DispatchAllToAll(
            self.order, self.layout, lambda: metadata.wait()[0][chunk], self.group, limit
        )
        self._ticket = begin(self._exchange, self.input, self.plan.probs, anchor=anchor)

    @property
    def row_counts(self) -> RowCounts:
        """How many rows are sent and received."""
        return self._metadata.wait()[0][self._chunk]

    @property
    def slot_counts(self) -> RowCounts:
        """How many slots they carry, where a row carries several."""
        return self._metadata.wait()[1][self._chunk]

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows sent to, and received from, each rank."""
        return tuple(self.row_counts.send), tuple(self.row_counts.receive)

    @property
    def dropped(self) -> list[int]:
        """Slots that no expert computes, per rank."""
        self._metadata.wait()
        return self._metadata.dropped

    @property
    def num_dropped(self) -> tuple[int, int]:
        """Slots that no expert computes, of this rank and of the group."""
        return self.dropped[self.group.rank()], sum(self.dropped)

    @property
    def num_experts(self) -> int:
        """Experts for which a rank of the group receives rows."""
        return self.plan.num_experts // self.group.size()

    def wait(self) -> DispatchedRows:
        """Return the rows that arrive."""
        rows, probs, self.anchor = end(self._exchange, self._ticket)
        ids = self._exchange.ids
        first = self.group.rank() * self.num_experts
        return DispatchedRows(rows, probs, torch.where(ids >= 0, ids - first, self.num_experts))

    def next(self, rows: torch.Tensor, plan: RoutingPlan) -> EagerHop:
        """Start the hop within the node."""
        dropped = rows.new_full((), sum(self.dropped), dtype=torch.int64)
        grads = wants_gradient(rows, plan.probs)
        return start_in_node(self._options, rows, plan, dropped, grads=grads, anchor=self.anchor)

    def combine_start(self, output: Any, order: torch.Tensor | None = None) -> _PendingExchange:
        """Start the exchange of results: one per row, or in an order one per slot."""
        vote = None
        if self._level == len(self._options.groups) - 1:  # the other hop only passes results on
            num_rows = sum(self.row_counts.receive)
            output, vote = vote_on_output(output, num_rows, self._like, self._groups)
        counts = self.row_counts if order is None else self.slot_counts
        num_slots = self.plan.permutation.numel()
        exchange = CombineAllToAll(counts, num_slots, self.group, output.shape[0], order)
        return _PendingExchange(exchange, begin(exchange, output, anchor=self.anchor), vote)


class _PendingExchange(NamedTuple):
    exchange: CombineAllToAll
    ticket: torch.Tensor
    vote: ErrorVote | None

    def wait(self) -> torch.Tensor:
        """Return the results; raises on every rank if the output of one does not fit."""
        if self.vote is not None:
            self.vote.second_hop()  # while rows travel
        rows, _ = end(self.exchange, self.ticket)
        if self.vote is not None:
            self.vote.wait()
        return rows


def vote_on_output(
    output: Any, num_rows: int, like: torch.Tensor, groups: Sequence[dist.ProcessGroup]
) -> tuple[torch.Tensor, ErrorVote | None]:
    """Check the experts' output, and start to send the other ranks the result of the check.

    Returns the output, or zeros in its place, which the others wait for. Raises on this rank alone
    if hosts can communicate only over the device, for whose work they would wait.
    """
    shape = num_rows, like.shape[1]
    problem: Exception | None = None
    try:
        checks.like("moe_combine", "output", output, "the rows", like, dtype=True)
        checks.shape("moe_combine", "output", output, shape, "that of the rows")
    except (TypeError, ValueError) as error:
        problem, output = error, like.new_zeros(shape)
    hosts = hosts_of(groups)
    if hosts is not None:
        return output, ErrorVote("moe_combine", hosts, problem)
    if problem is not None:
        raise problem
    return output, None


def wants_gradient(input: torch.Tensor, probs: torch.Tensor) -> bool:
    """Whether autograd will ask for gradients of what is sent."""
    return torch.is_grad_enabled() and (input.requires_grad or probs.requires_grad)


def dispatch_start(
    options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan
) -> list[TokenDispatcher]:
    """Check the arguments on all ranks and start to send each chunk of the tokens."""
    return [TokenDispatcher(options, hop) for hop in start_chunks(options, input, plan)]


def start_chunks(
    options: DispatchOptions,
    input: torch.Tensor,
    plan: RoutingPlan,
    *,
    grads: bool | None = None,
) -> list[EagerHop]:
    """Check the arguments, and start the first hop of each chunk.

    Args:
        options: of the call.
        input: ``[T, H]``.
        plan: the routing of its tokens.
        grads: whether autograd will ask for gradients; ``None`` derives it from the tensors.
    """
    check_on_all(options, input, plan)
    op, groups = options.op, options.groups
    faults = _faults(plan)
    if input.device.type == "cpu" and bool(faults):
        send_error(op, groups, input.device, bad_plan(op), ErrorCode.PLAN)
        raise bad_plan(op)
    if grads is None:
        grads = wants_gradient(input, plan.probs)
    plans = _chunks_of(plan, options.chunks)
    hops = [
        _first_hop(options, part, routing)
        for part, routing in zip(input.tensor_split(options.chunks), plans, strict=True)
    ]
    try:
        _start(hops, options, plan.num_dropped, faults, grads=grads)
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second hop.
        send_error(op, groups[1:], input.device, error, ErrorCode.OTHER_GROUP)
        raise
    if len(groups) == 1:
        connect(groups, input.device)
    return hops


def _first_hop(options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan) -> EagerHop:
    if len(options.groups) == 1:
        return EagerHop(options, 0, input, plan, SendOrder.of_slots(plan), plan)
    nodes = options.groups[0].size()
    order = order_to_nodes(plan, nodes)
    origin_plan = order.plan if options.reduce == "node" else slots_by_node(plan, nodes)
    return EagerHop(options, 0, input, plan, order, origin_plan)


def start_in_node(
    options: DispatchOptions,
    rows: torch.Tensor,
    plan: RoutingPlan,
    dropped: torch.Tensor,
    *,
    grads: bool,
    anchor: torch.Tensor | None = None,
) -> EagerHop:
    """Start the second hop, from the ranks of a node to those of the experts.

    Args:
        options: of the call.
        rows: the tokens that the first hop brought.
        plan: their routing in this node.
        dropped: int64 scalar, slots dropped on the ranks that the first hop joined.
        grads: whether autograd will ask for gradients.
        anchor: of the first hop.
    """
    hop = EagerHop(options, 1, rows, plan, SendOrder.of_slots(plan), plan)
    _start([hop], options, dropped, torch.zeros_like(dropped), grads=grads, anchor=anchor)
    connect(options.groups[::-1], rows.device)
    return hop


def _start(
    hops: Sequence[EagerHop],
    options: DispatchOptions,
    dropped: torch.Tensor,
    faults: torch.Tensor,
    *,
    grads: bool,
    anchor: torch.Tensor | None = None,
) -> None:
    """Exchange the metadata of all chunks at once, then pack and send each."""
    first = hops[0]
    signature = CallSignature(
        num_experts=first.plan.num_experts,
        hidden_size=first.input.shape[1],
        dtype=first.input.dtype,
        row_bytes=first.layout.stride,
        requires_grad=grads,
        chunks=len(hops),
        reduce=options.reduce,
        max_rows=-1 if options.max_rows is None else options.max_rows,
    )
    carries_slots = first.order.span > 0 and options.reduce == "home"
    metadata = Metadata(
        signature,
        rows=[rows_per_destination(hop.order.plan, first.group.size()) for hop in hops],
        slots=[hop.origin_plan.tokens_per_expert for hop in hops] if carries_slots else [],
        dropped=dropped,
        faults=faults,
    )
    exchange = MetadataExchange(options.op, first.group, first.input.device, metadata)
    for chunk, hop in enumerate(hops):
        hop.start(exchange, chunk, anchor)


def rows_per_destination(plan: RoutingPlan, size: int) -> torch.Tensor:
    """Return how many rows of a plan go to each of ``size`` ranks, int32."""
    per_rank = plan.num_experts // size
    ends = plan.offsets[per_rank - 1 :: per_rank]
    return torch.diff(ends, prepend=ends.new_zeros(1))


def _faults(plan: RoutingPlan) -> torch.Tensor:
    """Return 1 if ids or offsets are out of range, else 0, without waiting for the device."""
    num_slots, ends = plan.permutation.numel(), plan.offsets
    steps = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), num_slots))
    wrong = (steps < 0).any()
    if num_slots > 0:
        for values, last in (
            (plan.expert_ids, plan.num_experts),
            (plan.permutation, num_slots - 1),
            (plan.positions, num_slots - 1),
        ):
            low, high = values.aminmax()
            wrong = wrong | (low < 0) | (high > last)
    return wrong.to(torch.int32)


def _chunks_of(plan: RoutingPlan, chunks: int) -> list[RoutingPlan]:
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
