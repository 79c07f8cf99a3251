"""An all-to-all of rows as a differentiable step in two halves, to overlap with computation.

``begin`` starts the exchange and returns a ticket, ``end`` takes the ticket, waits and returns what
arrived. In the backward the halves change roles: the gradient of ``end`` starts the exchange of
gradients, the gradient of ``begin`` waits for it. An ``AsyncExchange`` defines what is exchanged.

The ticket is a scalar in the graph. ``end`` also returns an anchor, another scalar, for the
``begin`` of an exchange in the reverse direction: the graph then runs through every exchange on
every rank, also on one that has no rows, which takes part in the collectives of the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fusedops.parallel.comm.collectives import Pending, all_to_all


class AsyncExchange(Protocol):
    """What is sent, forwards and backwards. Each method is called once per pass, in this order."""

    def start(self, *tensors: torch.Tensor) -> None:
        """Start to send ``tensors``."""

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Wait, and return what arrived."""

    def start_backward(self, *grads: torch.Tensor) -> None:
        """Start to send the gradients of what ``finish`` returned."""

    def finish_backward(self) -> tuple[torch.Tensor | None, ...]:
        """Wait, and return the gradients of what ``start`` took."""


def begin(
    exchange: AsyncExchange, *tensors: torch.Tensor, anchor: torch.Tensor | None = None
) -> Any:
    """Start the exchange of ``tensors``; returns the ticket for ``end``."""
    return _Begin.apply(exchange, anchor, *tensors)


def end(exchange: AsyncExchange, ticket: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Wait for the exchange; returns what arrived, and the anchor."""
    return _End.apply(exchange, ticket)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: AsyncExchange, anchor: Any, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.anchored = anchor is not None
        exchange.start(*tensors)
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (ticket,) = grads
        return None, ticket if ctx.anchored else None, *ctx.exchange.finish_backward()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, ticket: torch.Tensor) -> Any:
        ctx.exchange = exchange
        return *exchange.finish(), torch.zeros_like(ticket)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.exchange.start_backward(*grads[:-1])
        return None, grads[-1]


class RowCounts(NamedTuple):
    """Rows that are sent to and received from each rank of a group."""

    send: list[int]
    receive: list[int]

    @property
    def reverse(self) -> RowCounts:
        """Those of the exchange in the reverse direction."""
        return RowCounts(self.receive, self.send)


def send_rows(
    rows: torch.Tensor,
    counts: RowCounts,
    group: dist.ProcessGroup,
    num_rows: int | None = None,
    *,
    label: str,
) -> Pending:
    """Start an all-to-all of rows ``[sum(counts.send), ...]``, those for rank 0 first.

    The result is those that arrive, in ``num_rows`` rows, by default as many as arrive; the rows
    after them are not written.
    """
    arriving = sum(counts.receive)
    rows = rows.contiguous()
    result = rows.new_empty((arriving if num_rows is None else num_rows, *rows.shape[1:]))
    out = _as_words(result[:arriving])
    send, receive = counts
    pending = all_to_all(_as_words(rows), group, send=send, receive=receive, out=out, label=label)

    def finish() -> torch.Tensor:
        pending.wait()
        return result

    return Pending(finish)


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of 2-d ``rows`` as the widest integers: backends count elements in int32."""
    width = rows.shape[1] * rows.element_size()
    integers = torch.int64, torch.int32, torch.uint8
    dtype = next(dtype for dtype in integers if width % dtype.itemsize == 0)
    if rows.numel() == 0:
        return rows.new_empty((rows.shape[0], width // dtype.itemsize), dtype=dtype)
    return rows.view(torch.uint8).view(dtype)
