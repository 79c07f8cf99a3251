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

from fusedops._core import checks
from fusedops.ops import moe_pack, moe_unpack, moe_unpermute
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.async_exchange import RowCounts, send_rows
from fusedops.parallel.expert.hierarchical import SendOrder
from fusedops.parallel.expert.metadata import ExchangeCounts

GRADIENTS_OF_TOKENS = "gradients of tokens"


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
