"""The all-to-alls of expert parallelism: tokens to the experts, and their results back.

``DispatchAllToAll`` sends packed rows in the order of a plan whose "experts" are destinations. Its
backward sends the gradients of rows and probabilities back, packed likewise, and the origin sums
them in the order of the slots. ``CombineAllToAll`` sends a result for each of these rows back.
Both are an ``AsyncExchange``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fusedops.ops import moe_pack, moe_unpack, moe_unpermute
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.parallel.async_exchange import RowCounts, send_rows
from fusedops.parallel.collective_errors import ErrorCode, vote
from fusedops.parallel.expert.arguments import DispatchOptions
from fusedops.parallel.expert.metadata import ExchangeCounts


@dataclass(frozen=True)
class SendOrder:
    """Which packed rows a rank sends, and in which order."""

    plan: RoutingPlan  # the plan whose rows, in order, are the packed rows
    # ``[T, k]`` int32, the packed row that carries each slot; for a slot that is not sent a
    # number beyond the last row
    row_of_slot: torch.Tensor
    expert_ids: torch.Tensor  # ``[T, k]`` int32, packed with the rows
    num_experts: int  # of each destination
    joins_slots: bool = False  # whether a row carries all slots of its token for a destination

    @classmethod
    def of_slots(cls, plan: RoutingPlan, destinations: int) -> SendOrder:
        """Return the order of a plan whose slots each have a row."""
        return cls(plan, plan.positions, plan.expert_ids, plan.num_experts // destinations)

    def layout(self, input: torch.Tensor, *, quantized: bool = False) -> PayloadLayout:
        """Return the layout of the packed rows."""
        pairs = self.plan.top_k if self.joins_slots else 1
        dtype = self.plan.probs.dtype
        return PayloadLayout(input.shape[1], input.dtype, dtype, pairs, quantized)


@dataclass(eq=False)
class DispatchAllToAll:
    """The exchange of one chunk of tokens towards the experts."""

    options: DispatchOptions
    level: int  # of the groups of ``options``
    order: SendOrder
    layout: PayloadLayout  # of a packed row
    get_counts: Callable[[], ExchangeCounts]  # may wait for the metadata
    # Int32 ``[rows, pairs]``, once finished: experts of this destination counted from 0; their
    # number stands for no expert
    ids: Any = field(default=None, init=False)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange rows."""
        return self.options.groups[self.level]

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
        counts, max_rows = self.get_counts().rows, self.options.max_rows
        if max_rows is not None:
            self._check_max_rows(max_rows, sum(counts.receive), input.device)
        payload = payload[: sum(counts.send)]
        self._pending = send_rows(payload, counts, self.group, max_rows, label="tokens to experts")

    def _check_max_rows(self, max_rows: int, num_arriving: int, device: torch.device) -> None:
        """Raise on every rank if more rows arrive on one; only that rank can know."""
        op, error = self.options.op, None
        if num_arriving > max_rows:
            expected = f"at least the {num_arriving} rows that arrive here"
            error = ValueError(f"{op}: max_rows must be {expected}, got {max_rows}")
        # Also the ranks across nodes, which wait for what passes this group.
        groups = self.options.groups[self.level :: -1]
        vote(op, groups, error, code=ErrorCode.TOO_MANY_ROWS, device=device)

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Return rows ``[R, H]`` and probabilities ``[R, pairs]`` as they arrived."""
        payload, layout = self._pending.wait(), self.layout
        arrived = sum(self.get_counts().rows.receive)
        payload[arrived:].zero_()
        ids, num_experts = layout.ids(payload), self.order.num_experts
        self.ids = torch.where(ids >= 0, ids - self.group.rank() * num_experts, num_experts)
        self.ids[arrived:] = num_experts
        # A copy also of a single row, where a view would do: results share no memory.
        probs = layout.probs(payload).clone(memory_format=torch.contiguous_format)
        if layout.quantized:
            return moe_unpack(payload, probs, self._like), probs
        return layout.rows(payload), probs

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Send the gradients of rows and probabilities to where the rows came from."""
        counts = self.get_counts().rows
        grad_rows, grad_probs = (grad[: sum(counts.receive)] for grad in grads)
        payload = moe_pack(grad_rows, grad_probs.to(self.layout.prob_dtype))
        num_slots = self.order.plan.permutation.numel()
        self._pending = send_rows(
            payload, counts.reverse, self.group, num_slots, label="gradients of tokens"
        )

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients of ``input`` and ``probs``."""
        payload = self._pending.wait()
        plan, sent = self.order.plan, self.layout
        layout = PayloadLayout(sent.hidden_size, sent.dtype, sent.prob_dtype, sent.pairs)
        grad_input = moe_unpermute(layout.rows(payload), plan, weighted=False)
        probs = layout.probs(payload)
        row = self.order.row_of_slot.long()
        pair = torch.arange(row.shape[1], device=row.device) if sent.pairs > 1 else 0
        is_sent = row < plan.offsets[-1]
        row = torch.where(is_sent, row, 0)
        if probs.shape[0] == 0:
            return grad_input, probs.new_zeros(row.shape)
        return grad_input, torch.where(is_sent, probs[row, pair], 0.0)


@dataclass(eq=False)
class CombineAllToAll:
    """The exchange of results, in the reverse direction of the rows that were dispatched."""

    # Of the dispatch: of rows, or of slots where a result is sent for each slot
    counts: RowCounts
    num_slots: int  # rows of what returns; those after the results are undefined
    group: dist.ProcessGroup
    num_results: int  # rows of the experts' output, at least those that are sent
    # Int32, begins with the results to send; ``None``: the first ones, in their order
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.order is not None:
            self.order = self.order[: sum(self.counts.receive)].long()

    def start(self, *tensors: torch.Tensor) -> None:
        """Send the results."""
        counts, (rows,) = self.counts, tensors
        if self.order is None:
            rows = rows[: sum(counts.receive)]
        else:
            rows = rows.index_select(0, self.order)
        self._pending = send_rows(
            rows, counts.reverse, self.group, self.num_slots, label="experts' results"
        )

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Return the results in the order in which their rows were dispatched."""
        return (self._pending.wait(),)

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Send the gradients of the results to the ranks that computed them."""
        counts = self.counts
        num_results = self.num_results if self.order is None else None
        rows = grads[0][: sum(counts.send)]
        self._pending = send_rows(
            rows, counts, self.group, num_results, label="gradients of results"
        )

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradient of the results."""
        grad = self._pending.wait()
        if self.order is not None:
            results = grad.new_zeros((self.num_results, grad.shape[1]))
            return (results.index_copy_(0, self.order, grad),)
        grad[sum(self.counts.receive) :].zero_()
        return (grad,)
