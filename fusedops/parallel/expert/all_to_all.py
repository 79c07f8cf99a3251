"""The exchanges of expert parallelism: tokens to the experts, and results on their way back.

A hop to the experts sends packed rows in the order of a plan whose "experts" are destinations. Its
backward sends gradients of rows and probabilities back, packed likewise, and adds them up at home
in the order of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedops.ops import moe_pack, moe_unpack, moe_unpermute
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.parallel.async_exchange import Transfer
from fusedops.parallel.expert.metadata import TOO_MANY, Rows, Verdict


@dataclass(frozen=True)
class Route:
    """Which packed rows a rank sends, and where.

    Attributes:
        order: a plan whose rows, in order, are the packed rows.
        row_of_slot: ``[T, k]`` int32, the packed row that carries each slot; beyond the last row
            where none does.
        expert_ids: ``[T, k]`` int32, what is packed beside the rows.
        span: 0: a row carries one slot. Above 0: all slots of its token on ``span`` experts.
    """

    order: RoutingPlan
    row_of_slot: torch.Tensor
    expert_ids: torch.Tensor
    span: int = 0

    def layout(self, input: torch.Tensor, *, quantized: bool) -> PayloadLayout:
        """Return the layout of its packed rows."""
        pairs = self.order.top_k if self.span > 0 else 1
        dtype = self.order.probs.dtype
        return PayloadLayout(input.shape[1], input.dtype, dtype, pairs, quantized)


@dataclass(frozen=True)
class Bound:
    """As many rows as a caller has room for, whatever arrives.

    Attributes:
        op: the function's name, for messages.
        rows: that many; those behind what arrived are zeros with id -1.
        groups: whose ranks must hear when more arrives on one of them.
    """

    op: str
    rows: int
    groups: Sequence[dist.ProcessGroup]

    def check(self, arriving: int, device: torch.device) -> None:
        """Raise on every rank when more arrives on one; only that one can know."""
        problem = None
        if arriving > self.rows:
            wanted = f"at least the {arriving} rows that arrive here"
            problem = ValueError(f"{self.op}: max_rows must be {wanted}, got {self.rows}")
        Verdict(self.op, self.groups, problem, complaint=TOO_MANY, device=device).wait()


class ToExperts:
    """The exchange of one chunk of tokens towards the experts.

    Args:
        route: which rows leave.
        layout: of a packed row.
        counted: returns how many rows go where; may wait for the ranks to agree.
        group: the process group.
        bound: rows of the result, or ``None`` for those that arrive.
    """

    def __init__(
        self,
        route: Route,
        layout: PayloadLayout,
        counted: Callable[[], Rows],
        group: dist.ProcessGroup,
        bound: Bound | None = None,
    ) -> None:
        self._route, self._layout = route, layout
        self._counted, self._group, self._bound = counted, group, bound
        self._transfer: Any = None
        self._like: Any = None
        self.ids: Any = None  # int32 [rows, pairs], once finished

    @property
    def rows(self) -> Rows:
        """How many rows go where; known once the ranks have agreed."""
        return self._counted()

    def start(self, *tensors: torch.Tensor) -> None:
        """Pack ``input`` and ``probs`` while the notes travel, then send."""
        input, probs = tensors
        order = self._route.order
        payload = moe_pack(
            input,
            probs,
            self._route.expert_ids,
            index=order.permutation,
            num_rows=order.offsets[-1:],
            span=self._route.span,
            quantized=self._layout.quantized,
        )
        self._like = input.new_empty((0, input.shape[1]))
        rows, room = self.rows, None
        if self._bound is not None:
            self._bound.check(sum(rows.receive), input.device)
            room = self._bound.rows
        self._transfer = Transfer(
            payload[: sum(rows.send)],
            rows.send,
            rows.receive,
            self._group,
            room,
            label="tokens to experts",
        )

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Return rows ``[R, H]`` and probabilities ``[R, pairs]`` as they arrived."""
        payload, layout = self._transfer.wait(), self._layout
        self._transfer = None
        arrived = sum(self.rows.receive)
        payload[arrived:].zero_()
        # Copies also where there is one row, which a view would serve: results share no memory.
        self.ids = layout.ids(payload).clone(memory_format=torch.contiguous_format)
        self.ids[arrived:] = -1
        probs = layout.probs(payload).clone(memory_format=torch.contiguous_format)
        if layout.quantized:
            return moe_unpack(payload, probs, self._like), probs
        return layout.rows(payload), probs

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Send the gradients of rows and probabilities home."""
        rows = self.rows
        grad_rows, grad_probs = (grad[: sum(rows.receive)] for grad in grads)
        payload = moe_pack(grad_rows, grad_probs.to(self._layout.prob_dtype))
        room = self._route.order.permutation.numel()
        self._transfer = Transfer(
            payload, rows.receive, rows.send, self._group, room, label="gradients of tokens"
        )

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients of ``input`` and ``probs``."""
        payload = self._transfer.wait()
        self._transfer = None
        route, full = self._route, self._layout
        layout = PayloadLayout(full.hidden_size, full.dtype, full.prob_dtype, full.pairs)
        grad_input = moe_unpermute(layout.rows(payload), route.order, weighted=False)
        probs = layout.probs(payload)
        row = route.row_of_slot.long()
        pair = torch.arange(row.shape[1], device=row.device) if full.pairs > 1 else 0
        carried = row < route.order.offsets[-1]
        row = torch.where(carried, row, 0)
        if probs.shape[0] == 0:
            return grad_input, probs.new_zeros(row.shape)
        return grad_input, torch.where(carried, probs[row, pair], 0.0)


class FromExperts:
    """The exchange of results, row for row the way back of rows that came.

    Args:
        came: how many rows, or slots where results are sent for each, left and came.
        room: rows of the result.
        group: the process group.
        came_room: rows of the gradient, at least those that came; ``None`` for as many.
        order: int32, beginning with the results to send; ``None``: the first ones, in their order.
            With it ``came_room`` is the number of all results.
    """

    def __init__(
        self,
        came: Rows,
        room: int,
        group: dist.ProcessGroup,
        came_room: int | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._came, self._room, self._group = came, room, group
        self._came_room = came_room
        self._order = None if order is None else order[: sum(came.receive)].long()
        self._transfer: Any = None

    def start(self, *tensors: torch.Tensor) -> None:
        """Send the results."""
        came, (rows,) = self._came, tensors
        if self._order is None:
            rows = rows[: sum(came.receive)]
        else:
            rows = rows.index_select(0, self._order)
        self._transfer = Transfer(
            rows, came.receive, came.send, self._group, self._room, label="experts' results"
        )

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Return them in the order in which the rows were sent; rows behind them are garbage."""
        rows = self._transfer.wait()
        self._transfer = None
        return (rows,)

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Send the gradients of the results to where they were computed."""
        came = self._came
        grad = grads[0][: sum(came.send)]
        room = self._came_room if self._order is None else None
        self._transfer = Transfer(
            grad, came.send, came.receive, self._group, room, label="gradients of results"
        )

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradient of the results."""
        grad = self._transfer.wait()
        self._transfer = None
        if self._order is not None:
            results = grad.new_zeros((self._came_room, grad.shape[1]))
            return (results.index_copy_(0, self._order, grad),)
        grad[sum(self._came.receive) :].zero_()
        return (grad,)
