"""The all-to-alls of expert parallelism: tokens to the experts, and their results back.

``start_dispatch`` begins a dispatch over one group: checks on all ranks, metadata, packed rows. An
error of one rank is sent to all before that rank raises, so that none waits for rows that never
come. What ``dispatcher.py`` does in steps and ``operators.py`` at once is this.

``DispatchAllToAll`` sends packed rows in the order of a plan whose "experts" are destinations. Its
backward sends the gradients of rows and probabilities back, packed likewise, and the origin sums
them in the order of the slots. ``CombineAllToAll`` sends a result for each of these rows back.
Both are an ``AsyncExchange``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_pack, moe_sort, moe_unpack, moe_unpermute
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.async_exchange import RowCounts, begin, end, send_rows
from fusedops.parallel.collective_errors import ErrorCode
from fusedops.parallel.expert.arguments import DispatchOptions, check_on_all
from fusedops.parallel.expert.hierarchical import SendOrder, origin_plan, send_order
from fusedops.parallel.expert.metadata import (
    CallSignature,
    ExchangeCounts,
    MetadataExchange,
    message,
    send_error,
)

GRADIENTS_OF_TOKENS = "gradients of tokens"


class DispatchResults(NamedTuple):
    """What arrives of a dispatch over one group."""

    rows: torch.Tensor  # ``[R, H]``, those for this rank
    probs: torch.Tensor  # ``[R, pairs]``; a row to a node carries all slots of its token there
    # ``[R, pairs]`` int32, from 0 for the first expert of the rank (at level 0 of two: of the
    # node); their number stands for no expert
    ids: torch.Tensor
    # Int64 ``[4, ranks]`` on the CPU: rows for and from each rank, slots for and from each,
    # where a row carries several
    counts: torch.Tensor
    dropped: torch.Tensor  # int64 ``[ranks]`` on the CPU, slots dropped on each
    anchor: torch.Tensor  # of the autograd graph


@dataclass(eq=False)
class DispatchAllToAll:
    """The exchange of one chunk of tokens towards the experts."""

    group: dist.ProcessGroup
    order: SendOrder
    layout: PayloadLayout  # of a packed row
    get_counts: Callable[[], ExchangeCounts]  # may wait for the metadata
    # Int32 ``[rows, pairs]``, once finished: experts of this destination counted from 0; their
    # number stands for no expert
    ids: Any = field(default=None, init=False)

    def start(self, *tensors: torch.Tensor) -> None:
        """Pack ``input`` and ``probs`` while the metadata is exchanged, then send."""
        input, probs = tensors
        plan = self.order.plan
        payload = moe_pack(
            input,
            probs,
            self.order.expert_ids,
            index=plan.permutation,
            num_rows=plan.offsets[-1:],
            span=self.order.num_experts if self.order.joins_slots else 0,
            quantized=self.layout.quantized,
        )
        self._like = input.new_empty((0, input.shape[1]))
        counts = self.get_counts().rows
        payload = payload[: sum(counts.send)]
        self._pending = send_rows(payload, counts, self.group, label="tokens to experts")

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Return rows ``[R, H]`` and probabilities ``[R, pairs]`` as they arrived."""
        payload, layout = self._pending.wait(), self.layout
        ids, num_experts = layout.ids(payload), self.order.num_experts
        self.ids = torch.where(ids >= 0, ids - self.group.rank() * num_experts, num_experts)
        # A copy also of a single row, where a view would do: results share no memory.
        probs = layout.probs(payload).clone(memory_format=torch.contiguous_format)
        if layout.quantized:
            return moe_unpack(payload, probs, self._like), probs
        return layout.rows(payload), probs

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Send the gradients of rows and probabilities to where the rows came from."""
        payload = moe_pack(grads[0], grads[1].to(self.layout.prob_dtype))
        counts, num_slots = self.get_counts().rows.reverse, self.order.plan.permutation.numel()
        self._pending = send_rows(payload, counts, self.group, num_slots, label=GRADIENTS_OF_TOKENS)

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients of ``input`` and ``probs``."""
        return token_gradients(self._pending.wait(), self.order, self._like)


def token_gradients(
    payload: torch.Tensor, order: SendOrder, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of tokens and probabilities from the packed ones of the rows sent.

    Rows of ``payload`` after those that were sent may be uninitialised. The gradient of the tokens
    has the dtype of ``like``, ``[.., H]``.
    """
    plan, layout = order.plan, order.layout(like)
    grad_input = moe_unpermute(layout.rows(payload), plan, weighted=False)
    probs = layout.probs(payload)
    row = order.row_of_slot.long()
    pair = torch.arange(row.shape[1], device=row.device) if layout.pairs > 1 else 0
    is_sent = row < plan.offsets[-1]
    row = torch.where(is_sent, row, 0)
    return grad_input, torch.where(is_sent, probs[row, pair], 0.0)


@dataclass(eq=False)
class CombineAllToAll:
    """The exchange of results, in the reverse direction of the rows that were dispatched."""

    counts: torch.Tensor  # of the dispatch, as in ``DispatchResults``
    group: dist.ProcessGroup
    num_slots: int  # rows of what returns; those after the results are undefined
    num_results: int  # rows of the experts' output
    # Int32, begins with the results to send, one per slot; ``None``: all of them, in their order
    order: torch.Tensor | None = None
    label: str = "experts' results"

    def __post_init__(self) -> None:
        counts = self.counts[:2] if self.order is None else self.counts[2:]
        self._sent = RowCounts(*counts.tolist())
        self._num_received = sum(self._sent.receive)
        if self.order is not None:
            self.order = self.order[: self._num_received].long()

    def start(self, *tensors: torch.Tensor) -> None:
        """Send the results."""
        (rows,) = tensors
        if self.order is not None:
            rows = rows.index_select(0, self.order)
        elif rows.shape[0] != self._num_received:
            expected = f"of {self._num_received} rows, as many as arrived"
            checks.fail("moe_combine", "output", expected, rows.shape[0])
        counts = self._sent.reverse
        self._pending = send_rows(rows, counts, self.group, self.num_slots, label=self.label)

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Return the results in the order in which their rows were dispatched."""
        return (self._pending.wait(),)

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Send the gradients of the results to the ranks that computed them."""
        rows = grads[0][: sum(self._sent.send)]
        self._pending = send_rows(rows, self._sent, self.group, label="gradients of results")

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradient of the results."""
        grad = self._pending.wait()
        if self.order is None:
            return (grad,)
        results = grad.new_zeros((self.num_results, grad.shape[1]))
        return (results.index_copy_(0, self.order, grad),)


# The plan of a chunk of tokens whose rows are being sent, and what waits for what arrives.
StartedChunk = tuple[RoutingPlan, Callable[[], DispatchResults]]


def start_dispatch(
    options: DispatchOptions,
    level: int,
    input: torch.Tensor,
    plan: RoutingPlan,
    *,
    grads: bool,
    dropped: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
) -> list[StartedChunk]:
    """Exchange the metadata of all chunks at once, then pack and send each.

    Args:
        options: of the dispatch.
        level: the index of the group over which rows are sent.
        input: ``[T, H]``; at level 1 the rows that level 0 received.
        plan: the routing of these.
        grads: whether autograd will ask for gradients.
        dropped: at level 1: an int64 scalar, the slots dropped on the ranks of level 0.
        anchor: at level 1: that of level 0.
    """
    plans, faults = [plan], plan.offsets.new_zeros(())
    if level == 0:
        check_on_all(options, input, plan)
        faults = _faults(plan)
        plan = _without_rows(plan, faults)
        dropped, plans = plan.num_dropped, _chunks_of(plan, options.chunks)
    assert dropped is not None
    orders = [send_order(options, level, part) for part in plans]
    layout = orders[0].layout(input, quantized=options.quantized)
    signature = CallSignature(
        num_experts=plan.num_experts,
        hidden_size=input.shape[1],
        dtype=input.dtype,
        row_bytes=layout.stride,
        requires_grad=grads,
        chunks=len(plans),
        reduce=options.reduce,
        validate=options.validate,
    )
    group, slots = options.groups[level], []
    if level < len(options.groups) - 1 and options.reduce == "source":
        slots = [origin_plan(options, level, part).tokens_per_expert for part in plans]
    rows = [_rows_per_destination(order.plan, group.size()) for order in orders]
    sent = message(group.size(), signature, rows, slots, dropped.to(input.device), faults)
    metadata = MetadataExchange(options.op, group, sent, len(plans))
    parts = input.tensor_split(len(plans)) if len(plans) > 1 else [input]
    started: list[StartedChunk] = []
    try:
        for chunk, (part, order) in enumerate(zip(plans, orders, strict=True)):
            exchange = DispatchAllToAll(group, order, layout, partial(metadata.of_chunk, chunk))
            ticket = begin(exchange, parts[chunk], part.probs, anchor=anchor)
            started.append((part, partial(_wait, exchange, ticket)))
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second hop.
        send_error(
            options.op, options.groups[level + 1 :], input.device, error, ErrorCode.OTHER_GROUP
        )
        raise
    return started


def _wait(exchange: DispatchAllToAll, ticket: torch.Tensor) -> DispatchResults:
    rows, probs, anchor = end(exchange, ticket)
    row_counts, slot_counts, dropped = exchange.get_counts()
    counts = torch.tensor([*row_counts, *slot_counts])
    return DispatchResults(rows, probs, exchange.ids, counts, torch.tensor(dropped), anchor)


def _rows_per_destination(plan: RoutingPlan, size: int) -> torch.Tensor:
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
