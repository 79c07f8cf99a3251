"""Rows that a rank needs from others along cut dims: sent point to point, and their gradients back.

The dims are exchanged one after the other. What the second exchange sends has the rows that came
with the first, so that corners arrive over two neighbours and no byte is sent twice. A rank sends
exactly what others need and do not have: the sum over the ranks is the size of their halos. Padding
of a constant is never sent; it is filled in where a box is copied out.

``Halo`` starts and waits for the dims one by one, so that a convolution computes what needs no halo
meanwhile. ``HaloGradient`` sends the gradients of halos back to the owners, which add them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.spatial.partition import Cut, Interval, Needs, overlap, single

Box = dict[int, Interval]  # by dim, global positions; other dims are complete


@lru_cache(1024)
def most_rows(spans: tuple[Interval, ...], needs: Needs) -> int:
    """Return the most rows that any rank sends to another, from what each has and needs."""
    most = 0
    for owner, receiver in itertools.permutations(range(len(spans)), 2):
        parts = [overlap(spans[owner], need) for need in needs[receiver]]
        most = max(most, sum(part[1] - part[0] for part in parts if part))
    return most


@dataclass(frozen=True)
class Window:
    """What the ranks need along one cut dim, in global positions that may exceed the tensor."""

    dim: int
    cut: Cut
    spans: tuple[Interval, ...]

    @property
    def span(self) -> Interval:
        """What this rank needs."""
        return self.spans[self.cut.axis.rank]

    @property
    def inside(self) -> Interval:
        """The part of ``span`` that is in the tensor."""
        return self.clipped(self.span)

    @property
    def needs(self) -> Needs:
        """What all ranks need, without positions outside of the tensor."""
        return single([self.clipped(span) for span in self.spans])

    @property
    def most_sent(self) -> int:
        """The most rows that any rank sends to another."""
        return most_rows(self.cut.spans(), self.needs)

    def clipped(self, span: Interval) -> Interval:
        """Return the part of a span in the tensor; an empty one lies at its own start."""
        start, stop = max(span[0], 0), min(span[1], self.cut.size)
        return (start, stop) if start < stop else (self.cut.own[0], self.cut.own[0])


def pieces(cut: Cut, needs: Needs) -> tuple[dict[int, list[Interval]], dict[int, list[Interval]]]:
    """Return what this rank sends to others, and what it receives, by their ranks."""
    me, sends, receives = cut.axis.rank, {}, {}
    for rank in range(cut.axis.size):
        if rank == me:
            continue
        sent = [overlap(cut.own, need) for need in needs[rank]]
        received = [overlap(cut.span(rank), need) for need in needs[me]]
        if any(sent):
            sends[rank] = [part for part in sent if part]
        if any(received):
            receives[rank] = [part for part in received if part]
    return sends, receives


class Halo:
    """A tensor, and the rows of others around it, dim by dim.

    Args:
        x: this rank's part.
        windows: what is needed, one for each cut dim that needs something.
        fill: the value of positions outside of the tensor.
        label: of the messages in the log.
    """

    def __init__(
        self, x: Tensor, windows: Sequence[Window], *, fill: float = 0.0, label: str = "halo"
    ) -> None:
        self.x, self.windows, self.fill, self.label = x, list(windows), fill, label
        self.received: list[list[Tensor]] = [[] for _ in windows]
        self._intervals = [_sources(window) for window in self.windows]
        self._pending: list[Pending | None] = [None] * len(self.windows)
        self._arrived = 0

    def start(self, level: int) -> None:
        """Send the rows that others need along a dim; all dims before have arrived."""
        window = self.windows[level]
        sends, receives = pieces(window.cut, window.needs)
        sent = {
            rank: torch.cat(
                [self._copy(level, self._rows(level, part)).reshape(-1) for part in parts]
            )
            for rank, parts in sends.items()
        }
        counts = {
            rank: sum(math.prod(self._piece_shape(level, part)) for part in parts)
            for rank, parts in receives.items()
        }
        longest = math.prod(self._piece_shape(level, (0, window.most_sent)))
        label = f"{self.label} {window.cut.axis.name}"
        self._pending[level] = collectives.exchange(
            sent, counts, window.cut.axis.group, longest=longest, like=self.x, label=label
        )

    def wait(self, level: int) -> None:
        """Wait for the rows of a dim."""
        pending = self._pending[level]
        assert pending is not None
        shapes = [self._piece_shape(level, part) for part, own in self._intervals[level] if not own]
        parts = pending.wait().split([math.prod(shape) for shape in shapes])
        self.received[level] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def advance(self, level: int) -> None:
        """Wait until so many dims have arrived; each one starts the next."""
        while self._arrived < level:
            self.wait(self._arrived)
            self._arrived += 1
            if self._arrived < len(self.windows):
                self.start(self._arrived)

    def exchange(self) -> None:
        """Exchange all dims."""
        if self.windows:
            self.start(0)
            self.advance(len(self.windows))

    def box(self, box: Box) -> Tensor:
        """Return a box of the extended tensor, maybe a view of this rank's part."""
        return self._copy(len(self.windows), box)

    def everything(self) -> Tensor:
        """Return all that this rank needs."""
        return self.box({window.dim: window.span for window in self.windows})

    def _rows(self, level: int, part: Interval) -> Box:
        """Return the box of rows along one dim, with the halos of the dims before."""
        return rows_box(self.windows, level, part)

    def _piece_shape(self, level: int, part: Interval) -> list[int]:
        shape = list(self.x.shape)
        for dim, (start, stop) in self._rows(level, part).items():
            shape[dim] = stop - start
        return shape

    def _copy(self, level: int, box: Box) -> Tensor:
        """Return a box, contiguous where it is a copy."""
        own = all(
            window.cut.own[0] <= box[window.dim][0] and box[window.dim][1] <= window.cut.own[1]
            for window in self.windows
        )
        if own:
            return narrowed(self.x, box, {w.dim: w.cut.own[0] for w in self.windows}).contiguous(
                memory_format=memory_format(self.x)
            )
        shape = list(self.x.shape)
        for dim, (start, stop) in box.items():
            shape[dim] = stop - start
        out = torch.empty(
            shape, dtype=self.x.dtype, device=self.x.device, memory_format=memory_format(self.x)
        )
        inside = dict(box)
        target = out
        for window in self.windows:
            start, stop = box[window.dim]
            low, high = max(start, 0), min(stop, window.cut.size)
            if low >= high:
                return out.fill_(self.fill)
            if low > start:
                target.narrow(window.dim, 0, low - start).fill_(self.fill)
            if high < stop:
                target.narrow(window.dim, high - start, stop - high).fill_(self.fill)
            target = target.narrow(window.dim, low - start, high - low)
            inside[window.dim] = (low, high)
        self._copy_into(target, level, inside)
        return out

    def _copy_into(self, out: Tensor, level: int, box: Box) -> None:
        """Copy a box that lies in the tensor; levels from ``level`` on have only own rows."""
        if level == 0:
            starts = {window.dim: window.cut.own[0] for window in self.windows}
            out.copy_(narrowed(self.x, box, starts))
            return
        window, intervals = self.windows[level - 1], self._intervals[level - 1]
        start, received = box[window.dim][0], 0
        for interval, own in intervals:
            place, received = received, received + (not own)
            part = overlap(interval, box[window.dim])
            if part is None:
                continue
            target = out.narrow(window.dim, part[0] - start, part[1] - part[0])
            rows = {**box, window.dim: part}
            if own:
                self._copy_into(target, level - 1, rows)
                continue
            origin = self._rows(level - 1, interval)
            starts = {dim: span[0] for dim, span in origin.items()}
            target.copy_(narrowed(self.received[level - 1][place], rows, starts))


def rows_box(windows: Sequence[Window], level: int, part: Interval) -> Box:
    """Return the box of rows along one dim, with the halos of the dims before."""
    box = {window.dim: window.inside for window in windows[:level]}
    box[windows[level].dim] = part
    return box | {window.dim: window.cut.own for window in windows[level + 1 :]}


def piece_boxes(windows: Sequence[Window]) -> list[list[Box]]:
    """Return the boxes of ``Halo.received``, in its order."""
    return [
        [rows_box(windows, level, part) for part, is_own in _sources(window) if not is_own]
        for level, window in enumerate(windows)
    ]


def split_gradient(
    grad: Tensor, windows: Sequence[Window], *, shared: bool = True
) -> tuple[Tensor, list[list[Tensor]]]:
    """Split the gradient of ``Halo.everything`` into that of the own part and of received rows.

    Args:
        grad: the gradient.
        windows: those of the halo.
        shared: whether others read ``grad``, so that nothing may be added to it in place.

    Returns:
        The gradient of the own part, and by dim those of what ``Halo.received`` has.
    """
    inside = {window.dim: window.inside for window in windows}
    starts = {
        window.dim: window.span[0] if _nonempty(window.inside) else window.inside[0]
        for window in windows
    }
    grad = narrowed(grad, inside, starts)
    parts = [[filled(grad, inside, box) for box in boxes] for boxes in piece_boxes(windows)]
    own = filled(grad, inside, {window.dim: window.cut.own for window in windows})
    if shared:
        return own.clone(), [[part.clone() for part in some] for some in parts]
    return own, parts


def filled(x: Tensor, available: Box, box: Box) -> Tensor:
    """Return a box of a tensor that has the box ``available``; zeros where it has nothing."""
    common = {dim: overlap(available[dim], span) or (span[0], span[0]) for dim, span in box.items()}
    starts = {dim: span[0] for dim, span in available.items()}
    if common == box:
        return narrowed(x, box, starts)
    shape = list(x.shape)
    for dim, (start, stop) in box.items():
        shape[dim] = stop - start
    out = x.new_zeros(shape)
    if all(_nonempty(span) for span in common.values()):
        target = narrowed(out, common, {dim: span[0] for dim, span in box.items()})
        target.copy_(narrowed(x, common, starts))
    return out


class HaloGradient:
    """The way back of a ``Halo``: gradients of received rows to their owners, which add them.

    Args:
        like: a tensor of the shape and dtype of this rank's part.
        parts: by dim, the gradients of what ``Halo.received`` has; they are changed.
        windows: those of the halo.
        label: of the messages in the log.
    """

    def __init__(
        self,
        like: Tensor,
        parts: Sequence[Sequence[Tensor]],
        windows: Sequence[Window],
        *,
        label: str = "halo grad",
    ) -> None:
        self.windows, self.label, self._like = list(windows), label, like
        self._blocks = list(zip(piece_boxes(windows), parts, strict=True))
        self._level = len(self.windows)
        self._pending: Pending | None = None

    def start(self) -> None:
        """Send the gradients of the last dim that is left."""
        if self._level == 0:
            return
        level = self._level - 1
        window = self.windows[level]
        mine, received = pieces(window.cut, window.needs)
        parts = self._blocks[level][1]
        counts = {
            rank: sum(math.prod(self._shape(level, part)) for part in intervals)
            for rank, intervals in mine.items()
        }
        self._pending = collectives.exchange(
            {rank: part.contiguous() for rank, part in zip(received, parts, strict=True)},
            counts,
            window.cut.axis.group,
            longest=math.prod(self._shape(level, (0, window.most_sent))),
            like=self._like,
            label=f"{self.label} {window.cut.axis.name}",
        )

    def finish(self, own: Tensor) -> Tensor:
        """Exchange all dims, add what arrives to the gradient of this rank's part, return that."""
        while self._level:
            if self._pending is None:
                self.start()
            self._add(own)
        return own

    def _add(self, own: Tensor) -> None:
        """Wait for the gradients of a dim, and add them to the own ones and those of other ranks.

        Others' are of rows that this rank received along dims before, and sends back next.
        """
        assert self._pending is not None
        arrived, self._pending = self._pending.wait(), None
        self._level -= 1
        level, window = self._level, self.windows[self._level]
        mine, _ = pieces(window.cut, window.needs)
        intervals = [part for parts in mine.values() for part in parts]
        shapes = [self._shape(level, part) for part in intervals]
        if not arrived.numel():
            return
        blocks = [({w.dim: w.cut.own for w in self.windows}, own)]
        blocks += [
            block
            for boxes, parts in self._blocks[:level]
            for block in zip(boxes, parts, strict=True)
        ]
        rows = arrived.split([math.prod(shape) for shape in shapes])
        for part, shape, values in zip(intervals, shapes, rows, strict=True):
            box = rows_box(self.windows, level, part)
            origin = {dim: span[0] for dim, span in box.items()}
            for place, block in blocks:
                common = {dim: overlap(span, place[dim]) for dim, span in box.items()}
                inner = {dim: span for dim, span in common.items() if span is not None}
                if len(inner) == len(common):
                    starts = {dim: span[0] for dim, span in place.items()}
                    narrowed(block, inner, starts).add_(narrowed(values.view(shape), inner, origin))

    def _shape(self, level: int, part: Interval) -> list[int]:
        shape = list(self._like.shape)
        for dim, (start, stop) in rows_box(self.windows, level, part).items():
            shape[dim] = stop - start
        return shape


def extend(
    x: Tensor, windows: Sequence[Window], *, fill: float = 0.0, label: str = "halo"
) -> Tensor:
    """Return this rank's part with what it needs around it; differentiable."""
    if not windows:
        return x
    return _Extend.apply(x, tuple(windows), fill, label)


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Any, fill: float, label: str) -> Tensor:
        ctx.windows, ctx.label = windows, label
        halo = Halo(x, windows, fill=fill, label=label)
        halo.exchange()
        out = halo.everything()
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own, parts = split_gradient(grad, ctx.windows)
        back = HaloGradient(own, parts, ctx.windows, label=f"{ctx.label} grad")
        return back.finish(own), None, None, None


def rows(x: Tensor, dim: int, cut: Cut, needs: Needs, *, label: str = "rows") -> Tensor:
    """Return the rows that this rank needs, in ascending order; differentiable."""
    return _Rows.apply(x, dim, cut, needs, label)


def _fetched(x: Tensor, dim: int, cut: Cut, needs: Needs, label: str) -> Tensor:
    """Return the rows of this rank's needs."""
    sends, receives = pieces(cut, needs)
    start = cut.own[0]
    row = _row(x.shape, dim)
    sent = {
        rank: torch.cat([x.narrow(dim, a - start, b - a).reshape(-1) for a, b in parts])
        for rank, parts in sends.items()
    }
    counts = {r: row * sum(b - a for a, b in parts) for r, parts in receives.items()}
    longest = row * most_rows(cut.spans(), needs)
    pending = collectives.exchange(
        sent, counts, cut.axis.group, longest=longest, like=x, label=label
    )
    own = [part for need in needs[cut.axis.rank] if (part := overlap(need, cut.own))]
    parts = [(part, x.narrow(dim, part[0] - start, part[1] - part[0])) for part in own]
    flat, offset = pending.wait(), 0
    for intervals in receives.values():
        for a, b in intervals:
            shape = [*x.shape]
            shape[dim] = b - a
            count = math.prod(shape)
            parts.append(((a, b), flat[offset : offset + count].view(shape)))
            offset += count
    if not parts:
        return x.narrow(dim, 0, 0).clone()
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim)


def _returned(grad: Tensor, dim: int, cut: Cut, needs: Needs, label: str) -> Tensor:
    """Return the gradient of the rows that this rank has: the sum of all ranks' uses."""
    offsets, place = {}, 0
    for a, b in needs[cut.axis.rank]:
        offsets[a, b] = place
        place += b - a

    def of(part: Interval) -> Tensor:
        for (a, b), offset in offsets.items():
            if a <= part[0] and part[1] <= b:
                return grad.narrow(dim, offset + part[0] - a, part[1] - part[0])
        raise AssertionError(part)

    mine, received = pieces(cut, needs)
    row = _row(grad.shape, dim)
    sends = {
        rank: torch.cat([of(part).reshape(-1) for part in parts])
        for rank, parts in received.items()
    }
    counts = {rank: row * sum(b - a for a, b in parts) for rank, parts in mine.items()}
    longest = row * most_rows(cut.spans(), needs)
    pending = collectives.exchange(
        sends, counts, cut.axis.group, longest=longest, like=grad, label=f"{label} grad"
    )
    start, shape = cut.own[0], [*grad.shape]
    shape[dim] = cut.extent
    total = grad.new_zeros(shape)
    for need in needs[cut.axis.rank]:
        part = overlap(need, cut.own)
        if part:
            total.narrow(dim, part[0] - start, part[1] - part[0]).add_(of(part))
    flat, offset = pending.wait(), 0
    for intervals in mine.values() if row else ():
        for a, b in intervals:
            shape[dim] = b - a
            count = math.prod(shape)
            piece = flat[offset : offset + count].view(shape)
            total.narrow(dim, a - start, b - a).add_(piece)
            offset += count
    return total


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, cut: Cut, needs: Needs, label: str) -> Tensor:
        ctx.arguments = dim, cut, needs, label
        return _fetched(x, dim, cut, needs, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Rows_grad.apply(grad, *ctx.arguments), None, None, None, None


class _Rows_grad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, dim: int, cut: Cut, needs: Needs, label: str) -> Tensor:
        ctx.arguments = dim, cut, needs, label
        return _returned(grad, dim, cut, needs, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Rows.apply(grad, *ctx.arguments), None, None, None, None


def _sources(window: Window) -> list[tuple[Interval, bool]]:
    """Return the intervals of what this rank needs by their owner, own ones marked.

    Received ones stand in the order of the ranks that send them, which is that of the rows.
    """
    result = []
    for rank in range(window.cut.axis.size):
        part = overlap(window.cut.span(rank), window.inside)
        if part is not None:
            result.append((part, rank == window.cut.axis.rank))
    return result


def memory_format(x: Tensor) -> torch.memory_format:
    """Return how a tensor lies in memory: channels last, or contiguous."""
    for ndim, kind in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == ndim and x.is_contiguous(memory_format=kind) and not x.is_contiguous():
            return kind
    return torch.contiguous_format


def narrowed(x: Tensor, box: Box, starts: dict[int, int]) -> Tensor:
    """Return the view of a box of a tensor that begins at ``starts``."""
    for dim, (start, stop) in box.items():
        if start != starts[dim] or stop - start != x.shape[dim]:
            x = x.narrow(dim, start - starts[dim], stop - start)
    return x


def _nonempty(interval: Interval) -> bool:
    return interval[0] < interval[1]


def _row(shape: Sequence[int], dim: int) -> int:
    """Return the number of elements of one row of a dim."""
    return math.prod(size for place, size in enumerate(shape) if place != dim)
