"""Two copies of a computation that take turns: one communicates while the other computes.

A copy is a generator. It begins a communication, yields, and waits for the result when it is its
turn again; what the other copy does in between runs beside it. ``entering`` and ``leaving`` are
the communications around a region of split features (``tensor.py``) in such halves, ``Trip`` of
``expert.py`` is the exchange of experts.

Nothing orders the backward but the engine, which runs the node that was made last of those that are
ready. Two copies do not depend on each other: of one of them a node is always ready, so that nodes
run in the reverse of the order in which they were made. A turn's backward is then a turn, and a
communication that lies between two turns of a copy lies between their backwards: the second half
of a pair begins it, the first half waits for it, and the other copy's turn in between runs beside
it as it did forward.

Reference: Ren et al.: PanGu-Sigma, arXiv:2303.10845; Jangda et al.: CoCoNet, ASPLOS 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fusedops.parallel import communication
from fusedops.parallel._exchange import begin, end
from fusedops.parallel.communication import Pending, Span

T = TypeVar("T")
# Yields what its next turn is called, and returns tensors that its backward starts from.
Copy: TypeAlias = Generator[str, None, tuple[torch.Tensor, T]]
_Start: TypeAlias = Callable[[torch.Tensor], Pending]


def take_turns(copies: Sequence[Copy[T]], *, ahead: int) -> list[tuple[torch.Tensor, T]]:
    """Run two copies, a turn of one after a turn of the other.

    Args:
        copies: the two.
        ahead: turns that the first has made when the second begins.

    Returns:
        What each returned, the first tensor of which must be used.

    Note:
        While communications are recorded every turn is a computation in the log, forward and
        backward, called ``"copy 0: norm"`` by what the copy said of it.
    """
    trace = _Trace()
    running = {number: _Running(number, copy, trace) for number, copy in enumerate(copies)}
    assert len(running) == 2
    first, second = running.values()
    for _ in range(ahead):
        first.turn()
    while not (first.is_done and second.is_done):
        second.turn()
        first.turn()
    (x, *more), other = first.result, second.result
    return [(trace.tied_to(x), *more), other]


class _Running:
    """A copy under way."""

    def __init__(self, number: int, copy: Copy[Any], trace: _Trace) -> None:
        self._number, self._copy, self._trace = number, copy, trace
        self._next = "begin"
        self.is_done = False
        self.result: Any = None

    def turn(self) -> None:
        """Run it to where it yields or returns; nothing if it has returned."""
        if self.is_done:
            return
        span = self._trace.begin(f"copy {self._number}: {self._next}")
        try:
            self._next = next(self._copy)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
        self._trace.end(span)


class _Trace:
    """Marks turns in a log that is open, and their backwards.

    A chain of scalars of which each turn makes two: the backward of those runs when the turn's
    does.
    """

    def __init__(self) -> None:
        self._on = communication.is_recorded()
        self._link: torch.Tensor | None = None
        if self._on and torch.is_grad_enabled():
            self._link = torch.zeros((), requires_grad=True)

    def begin(self, label: str) -> Span | None:
        """Mark the start of a turn."""
        if not self._on:
            return None
        span, back = Span(label), Span(f"{label}, backward")
        self._back = back
        if self._link is not None:
            self._link = _Tick.apply(self._link, back.end)
        span.start()
        return span

    def end(self, span: Span | None) -> None:
        """Mark its end."""
        if span is None:
            return
        span.end()
        if self._link is not None:
            self._link = _Tick.apply(self._link, self._back.start)

    def tied_to(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, whose backward is that of the chain as well."""
        return x if self._link is None else _Tie.apply(x, self._link)


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, mark: Callable[[], None]) -> torch.Tensor:
        ctx.mark = mark
        return link.view_as(link)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.mark()
        return grads[0], None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
        ctx.link = link.detach()
        return x.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.zeros_like(ctx.link)


class Underway:
    """A tensor that is communicated, forward or backward, until it is waited for."""

    def __init__(self, tensor: torch.Tensor, forward: _Start, backward: _Start) -> None:
        self._crossing = _Crossing(forward, backward)
        self._ticket = begin(self._crossing, tensor)

    def wait(self) -> torch.Tensor:
        """Return the result; backward its gradient begins to travel here."""
        return end(self._crossing, self._ticket)[0]


def entering(input: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> Underway:
    """Begin ``tensor.enter``."""
    if sequence:
        return Underway(input, _gather(group), _scatter(group))
    return Underway(input, _stay, _sum(group))


def leaving(partial: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> Underway:
    """Begin ``tensor.leave``."""
    if sequence:
        return Underway(partial, _scatter(group), _gather(group))
    return Underway(partial, _sum(group), _stay)


class _Crossing:
    """An ``Exchange`` of one tensor, by a communication forward and another backward."""

    def __init__(self, forward: _Start, backward: _Start) -> None:
        self._forward, self._backward = forward, backward
        self._pending: Any = None

    def start(self, *tensors: torch.Tensor) -> None:
        # Cut off: what ``finish`` returns is no tensor that stands in the graph already.
        self._pending = self._forward(tensors[0].detach())

    def finish(self) -> tuple[torch.Tensor, ...]:
        return self._taken()

    def start_backward(self, *grads: torch.Tensor) -> None:
        self._pending = self._backward(grads[0])

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        return self._taken()

    def _taken(self) -> tuple[torch.Tensor]:
        pending, self._pending = self._pending, None
        return (pending.wait(),)


def _stay(tensor: torch.Tensor) -> Pending:
    return Pending(lambda: tensor)


def _sum(group: dist.ProcessGroup) -> _Start:
    def start(tensor: torch.Tensor) -> Pending:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return communication.all_reduce(own, group)

    return start


def _gather(group: dist.ProcessGroup) -> _Start:
    return lambda tensor: communication.all_gather(tensor, group, dim=-2)


def _scatter(group: dist.ProcessGroup) -> _Start:
    return lambda tensor: communication.reduce_scatter(tensor, group, dim=-2)
