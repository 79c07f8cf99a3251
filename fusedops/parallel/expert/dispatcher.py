"""The token dispatcher: tokens to the ranks of their experts, and the experts' results back.

``TokenDispatcher`` has the steps of dispatch and combine, over one group or, hierarchically, over
two. A step is one exchange over one group, a *hop*, of which there are two kinds. Compiled graphs,
and calls with a static number of rows, use a hop that is an operator, which starts and waits at
once (``operators.py``). All other calls use the eager hop of this file, for the sake of chunks: it
starts and waits in separate steps, so that the experts compute one chunk while later chunks arrive
and earlier results travel back. The operators run an eager hop inside.

An error of one rank is sent to all before that rank raises, so that none waits for rows that never
come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel.async_exchange import RowCounts, begin, end
from fusedops.parallel.collective_errors import ErrorCode, ErrorVote
from fusedops.parallel.comm.collectives import Pending
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
    send_error,
)


class DispatchedRows(NamedTuple):
    """What a hop receives: ``rows`` ``[R, H]``, and ``probs`` and ``ids``, ``[R, pairs]``.

    Ids count from 0 for the first expert of the rank (of the node, before the second hop); their
    number stands for no expert.
    """

    rows: torch.Tensor
    probs: torch.Tensor
    ids: torch.Tensor


class Hop(ABC):
    """An exchange of rows over one group, ``options.groups[level]``, and of results in reverse.

    ``input`` is ``[T, H]``. ``is_eager``: the hop is no operator, and must not be traced.
    """

    is_eager = False

    def __init__(
        self, options: DispatchOptions, level: int, input: torch.Tensor, plan: RoutingPlan
    ) -> None:
        self.options, self.level, self.plan = options, level, plan
        self.group = options.groups[level]
        # Experts for which a rank of the group receives rows.
        self.num_experts = plan.num_experts // self.group.size()
        self.like = input.detach()[:0]

    @property
    @abstractmethod
    def origin_plan(self) -> RoutingPlan:
        """The routing by which the results that return are summed."""

    @property
    @abstractmethod
    def counts(self) -> tuple[Any, Any]:
        """Rows sent to, and received from, each rank."""

    @property
    @abstractmethod
    def num_dropped(self) -> tuple[Any, Any]:
        """Slots that no expert computes, of this rank and of the group."""

    @abstractmethod
    def wait(self) -> DispatchedRows:
        """Return the rows that arrive."""

    @abstractmethod
    def next(self, rows: torch.Tensor, plan: RoutingPlan) -> Hop:
        """Start the hop within the node."""

    @abstractmethod
    def combine_start(self, output: torch.Tensor, order: torch.Tensor | None = None) -> Pending:
        """Start the exchange of results: one per row, or in an order one per slot.

        They return in the order in which the rows were dispatched.
        """


class TokenDispatcher:
    """Dispatch and combine of one chunk of tokens, from its first hop on."""

    def __init__(self, options: DispatchOptions, first: Hop) -> None:
        self.hops = [first]
        self._options = options

    def second_hop(self) -> None:
        """Wait for the tokens of this node, and send them to the ranks of their experts.

        Does nothing over a single group, or if it was called before.
        """
        if len(self.hops) < len(self._options.groups):
            first = self.hops[0]
            rows, probs, ids = first.wait()
            self.hops.append(first.next(rows, plan_in_node(ids, probs, first.num_experts)))

    def wait_tokens(self) -> tuple[torch.Tensor, RoutingPlan]:
        """Return the rows for the experts of this rank, and their routing over these."""
        self.second_hop()
        last = self.hops[-1]
        rows, probs, ids = last.wait()
        # Padding has no expert; without padding each row has one.
        has_expert = None if self._options.max_rows is None else ids < last.num_experts
        order = moe_sort(ids, last.num_experts)
        return rows, RoutingPlan(ids, probs, *order, has_expert, last.num_experts)

    def combine_start(self, output: torch.Tensor) -> PendingCombine:
        """Start to send the experts' results back."""
        return PendingCombine(self.hops, output)


class PendingCombine:
    """Results sent to the ranks of their tokens. The constructor starts the exchange.

    ``hops`` dispatched the rows, and ``output`` ``[R, H]`` has the result of each row.
    """

    def __init__(self, hops: Sequence[Hop], output: torch.Tensor) -> None:
        self._hops = hops
        self._in_node = hops[0].options.reduce == "node"
        self._num_waiting = len(hops)
        self._pending = hops[-1].combine_start(output)

    def second_hop(self, *, weighted: bool) -> None:
        """Wait for the results of this node, and send them to the ranks of their tokens."""
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


class _EagerHop(Hop):
    """A hop whose start and wait are separate steps."""

    is_eager = True

    def __init__(
        self, options: DispatchOptions, level: int, input: torch.Tensor, plan: RoutingPlan
    ) -> None:
        super().__init__(options, level, input, plan)
        self.input = input
        self.order, self._origin_plan = SendOrder.of_slots(plan), plan
        self.to_nodes = level < len(options.groups) - 1
        if self.to_nodes:
            self.order = order_to_nodes(plan, self.group.size())
            self._origin_plan = self.order.plan
            if options.reduce == "home":
                self._origin_plan = slots_by_node(plan, self.group.size())
        self.layout = self.order.layout(input, quantized=options.quantized)
        # The group, and that across nodes, whose ranks wait for what passes this one.
        self._waiting_groups = options.groups[level::-1]
        self.anchor: Any = None

    def start(self, metadata: MetadataExchange, chunk: int, anchor: Any = None) -> None:
        """Pack and send the rows."""
        op, max_rows = self.options.op, self.options.max_rows
        limit = None if max_rows is None else RowLimit(op, max_rows, self._waiting_groups)
        self._metadata, self._chunk = metadata, chunk
        self._exchange = DispatchAllToAll(
            self.order, self.layout, lambda: metadata.wait().rows[chunk], self.group, limit
        )
        self._ticket = begin(self._exchange, self.input, self.plan.probs, anchor=anchor)

    @property
    def row_counts(self) -> RowCounts:
        """Rows that are sent and received."""
        return self._metadata.wait().rows[self._chunk]

    @property
    def slot_counts(self) -> RowCounts:
        """Slots that they carry, where a row carries several."""
        return self._metadata.wait().slots[self._chunk]

    @property
    def dropped(self) -> list[int]:
        """Slots that no expert computes, per rank."""
        return self._metadata.wait().dropped

    @property
    def origin_plan(self) -> RoutingPlan:
        return self._origin_plan

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.row_counts.send), tuple(self.row_counts.receive)

    @property
    def num_dropped(self) -> tuple[int, int]:
        return self.dropped[self.group.rank()], sum(self.dropped)

    def wait(self) -> DispatchedRows:
        rows, probs, self.anchor = end(self._exchange, self._ticket)
        ids = self._exchange.ids
        first = self.group.rank() * self.num_experts
        return DispatchedRows(rows, probs, torch.where(ids >= 0, ids - first, self.num_experts))

    def next(self, rows: torch.Tensor, plan: RoutingPlan) -> _EagerHop:
        dropped = rows.new_full((), sum(self.dropped), dtype=torch.int64)
        grads = wants_gradient(rows, plan.probs)
        return start_in_node(self.options, rows, plan, dropped, grads=grads, anchor=self.anchor)

    def combine_start(self, output: Any, order: torch.Tensor | None = None) -> Pending:
        vote = None
        if not self.to_nodes:  # the other hop only passes results on
            num_rows = sum(self.row_counts.receive)
            output, vote = vote_on_output(output, num_rows, self.like, self._waiting_groups)
        counts = self.row_counts if order is None else self.slot_counts
        num_slots = self.plan.permutation.numel()
        exchange = CombineAllToAll(counts, num_slots, self.group, output.shape[0], order)
        return send_results(exchange, output, vote, self.anchor)


def send_results(
    exchange: CombineAllToAll,
    output: torch.Tensor,
    vote: ErrorVote | None,
    anchor: torch.Tensor | None = None,
) -> Pending:
    """Start to send results; waiting raises on every rank if the vote says so."""
    ticket = begin(exchange, output, anchor=anchor)

    def finish() -> torch.Tensor:
        if vote is not None:
            vote.second_hop()  # while rows travel
        rows, _ = end(exchange, ticket)
        if vote is not None:
            vote.wait()
        return rows

    return Pending(finish)


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
    try:
        if problem is not None:
            raise problem
    finally:
        del problem  # its traceback refers to this frame: a cycle would keep the tensors
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
) -> list[_EagerHop]:
    """Check the arguments, and start the first hop of each chunk.

    ``grads`` is whether autograd will ask for gradients; ``None`` derives it from the tensors.
    """
    check_on_all(options, input, plan)
    op, groups = options.op, options.groups
    faults = _faults(plan)
    plan = _without_rows(plan, faults)
    if grads is None:
        grads = wants_gradient(input, plan.probs)
    plans = _chunks_of(plan, options.chunks)
    parts = zip(input.tensor_split(options.chunks), plans, strict=True)
    hops = [_EagerHop(options, 0, part, routing) for part, routing in parts]
    try:
        _start(hops, options, plan.num_dropped, faults, grads=grads)
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second hop.
        send_error(op, groups[1:], input.device, error, ErrorCode.OTHER_GROUP)
        raise
    if len(groups) == 1:
        connect(groups, input.device)
    return hops


def start_in_node(
    options: DispatchOptions,
    rows: torch.Tensor,
    plan: RoutingPlan,
    dropped: torch.Tensor,
    *,
    grads: bool,
    anchor: torch.Tensor | None = None,
) -> _EagerHop:
    """Start the second hop, from the ranks of a node to those of the experts.

    ``rows`` are the tokens that the first hop received, ``plan`` their routing in this node,
    ``dropped`` an int64 scalar, the slots dropped on the ranks of the first hop, and ``anchor``
    that hop's.
    """
    hop = _EagerHop(options, 1, rows, plan)
    _start([hop], options, dropped, torch.zeros_like(dropped), grads=grads, anchor=anchor)
    connect(options.groups[::-1], rows.device)
    return hop


def _start(
    hops: Sequence[_EagerHop],
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
    carries_slots = first.to_nodes and options.reduce == "home"
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


def _without_rows(plan: RoutingPlan, faults: torch.Tensor) -> RoutingPlan:
    """Return the plan, or where it has faults one of the same shapes that sends nothing.

    Rows are packed before the host knows of the faults, which would read out of bounds.
    """
    names = ("expert_ids", "permutation", "positions", "tokens_per_expert", "offsets")
    fields: dict[str, Any] = {
        name: torch.where(faults > 0, 0, getattr(plan, name)) for name in names
    }
    return replace(plan, **fields)


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
