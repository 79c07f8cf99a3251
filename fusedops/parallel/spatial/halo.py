"""Rows that a rank needs from others along cut dims: sent point to point, and their gradients back.

What the ranks need of a cut dim is a ``Window``, which all ranks know. The dims are exchanged one
after the other. What the second exchange sends has the rows that came with the first, so that
corners arrive over two neighbours and no byte is sent twice. A rank sends exactly what others need
and do not have: the sum over the ranks is the size of their halos. Padding of a constant is never
sent; it is filled in where a box is copied out.

A rank has blocks: its own part, and one for every interval of rows that it has received. ``Halo``
receives blocks, dim by dim, so that a convolution computes what needs no halo meanwhile.
``return_gradients`` sends the gradients of the received blocks back to the owners, which add them.
``extend`` and ``fetch_rows`` are both together, as differentiable functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial.partition import Cut, Interval, Needs, overlap, single

Box = dict[int, Interval]  # by dim, global positions; other dims are complete
Block = tuple[Box, Tensor]  # a box, and its values
Messages = dict[int, list[Box]]  # by the other rank


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
    """What the ranks need along one cut dim."""

    dim: int
    cut: Cut
    needs: Needs  # rows of the tensor
    # What this rank copies out: the intervals that it needs, or one span, which may exceed the
    # tensor. Several intervals only where there is one window.
    pieces: tuple[Interval, ...]

    @property
    def inside(self) -> Interval:
        """The rows of the tensor from the first to the last that this rank needs."""
        needs = self.needs[self.cut.axis.rank]
        return (needs[0][0], needs[-1][1]) if needs else (self.cut.own[0], self.cut.own[0])


def span_window(dim: int, cut: Cut, spans: Sequence[Interval]) -> Window:
    """Return the window of one span for each rank, in positions that may exceed the tensor."""
    inside = [overlap(span, (0, cut.size)) or (0, 0) for span in spans]
    return Window(dim, cut, single(inside), (spans[cut.axis.rank],))


def own_box(windows: Sequence[Window]) -> Box:
    """Return the box of this rank's part."""
    return {window.dim: window.cut.own for window in windows}


def _rows_box(windows: Sequence[Window], level: int, rows: Interval) -> Box:
    """Return the box of rows along one dim, with the halos of the dims before."""
    box = {window.dim: window.inside for window in windows[:level]}
    return box | {windows[level].dim: rows} | own_box(windows[level + 1 :])


def _messages(windows: Sequence[Window], level: int) -> tuple[Messages, Messages]:
    """Return what this rank sends along one dim, and what it receives."""
    cut, needs = windows[level].cut, windows[level].needs

    def boxes(owner: int, receiver: int) -> list[Box]:
        parts = [overlap(cut.span(owner), need) for need in needs[receiver]]
        return [_rows_box(windows, level, part) for part in parts if part]

    me, others = cut.axis.rank, [rank for rank in range(cut.axis.size) if rank != cut.axis.rank]
    return {r: boxes(me, r) for r in others}, {r: boxes(r, me) for r in others}


def received_boxes(windows: Sequence[Window]) -> list[Box]:
    """Return the boxes of what ``Halo`` receives, in its order."""
    levels = [_messages(windows, level)[1] for level in range(len(windows))]
    return [box for receives in levels for boxes in receives.values() for box in boxes]


def _exchange(
    windows: Sequence[Window],
    level: int,
    blocks: Sequence[Block],
    messages: tuple[Messages, Messages],
    like: Tensor,
    label: str,
) -> Callable[[], list[Block]]:
    """Send boxes of the blocks along a dim; the function that is returned waits for others."""
    cut = windows[level].cut
    sent = {}
    for rank, boxes in messages[0].items():
        parts = [read(blocks, box) for box in boxes]
        if parts:
            joined = torch.cat([part.reshape(-1) for part in parts]) if parts[1:] else parts[0]
            sent[rank] = joined.contiguous()
    shapes = {r: [_box_shape(like, box) for box in boxes] for r, boxes in messages[1].items()}
    most = _rows_box(windows, level, (0, most_rows(cut.spans(), windows[level].needs)))
    pending = collectives.exchange(
        sent,
        {rank: sum(map(math.prod, sizes)) for rank, sizes in shapes.items()},
        cut.axis.group,
        longest=math.prod(_box_shape(like, most)),
        like=like,
        label=f"{label} {cut.axis.name}",
    )

    def wait() -> list[Block]:
        boxes = itertools.chain(*messages[1].values())
        sizes = list(itertools.chain(*shapes.values()))
        parts = pending.wait().split([math.prod(size) for size in sizes])
        return [(box, part.view(s)) for box, part, s in zip(boxes, parts, sizes, strict=True)]

    return wait


class Halo:
    """This rank's part and the rows of others around it; starts to send for the first dim."""

    def __init__(self, x: Tensor, windows: Sequence[Window], label: str = "halo") -> None:
        self._windows, self._label, self._level = windows, label, 0
        self.blocks: list[Block] = [(own_box(windows), x)]
        self._start()

    def _start(self) -> None:
        """Send the rows that others need along the next dim, if there is one."""
        if self._level < len(self._windows):
            messages, x = _messages(self._windows, self._level), self.blocks[0][1]
            self._wait = _exchange(
                self._windows, self._level, self.blocks, messages, x, self._label
            )

    def advance(self, level: int) -> None:
        """Wait until so many dims have arrived; each one starts the next."""
        while self._level < level:
            self.blocks += self._wait()
            self._level += 1
            self._start()


def return_gradients(
    parts: Sequence[Block], windows: Sequence[Window], like: Tensor, label: str = "halo"
) -> Callable[[Tensor], Tensor]:
    """Start to send the gradients of received blocks back to the owners, the last dim first.

    They are changed. The function that is returned adds what arrives to the gradient of this
    rank's part, and returns that. ``like`` has the shape and dtype of the part.
    """

    def start(level: int) -> Callable[[], list[Block]]:
        sent, received = _messages(windows, level)
        return _exchange(windows, level, parts, (received, sent), like, f"{label} grad")

    first = start(len(windows) - 1) if windows else None

    def finish(own: Tensor) -> Tensor:
        # Some of what arrives is of rows that this rank received along dims before, and sends next.
        blocks, wait = [(own_box(windows), own), *parts], first
        for level in reversed(range(len(windows))):
            for arrived in (wait or start(level))():
                for block in blocks:
                    if common := _common(block, arrived):
                        common[0].add_(common[1])
            wait = None
        return own

    return finish


def extend(
    x: Tensor, windows: Sequence[Window], fill: float = 0.0, label: str = "halo", copy: bool = True
) -> Tensor:
    """Return this rank's part with what it needs around it; differentiable.

    Without ``copy`` the result may be a view, and its gradient is changed: nobody else has them.
    """
    own = all(w.pieces == (w.cut.own,) for w in windows)
    if own and all(most_rows(w.cut.spans(), w.needs) == 0 for w in windows):
        return x
    return _FetchRows.apply(x, tuple(windows), fill, label, copy)


def fetch_rows(x: Tensor, dim: int, cut: Cut, needs: Needs, *, label: str = "rows") -> Tensor:
    """Return the rows that this rank needs, in ascending order; differentiable."""
    pieces = needs[cut.axis.rank] or ((cut.own[0], cut.own[0]),)
    return _FetchRows.apply(x, (Window(dim, cut, needs, pieces),), 0.0, label, True)


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Any, fill: float, label: str, copy: bool) -> Tensor:
        ctx.windows, ctx.label, ctx.copy = windows, label, copy
        halo = Halo(x, windows, label)
        halo.advance(len(windows))
        parts = [read(halo.blocks, box, fill=fill) for box in _pieces(windows)]
        out = torch.cat(parts, windows[0].dim) if parts[1:] else parts[0]
        # A view could not be changed in place by the caller.
        return out.clone() if copy and (out is x or out._is_view()) else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        windows, boxes = ctx.windows, _pieces(ctx.windows)
        dim = windows[0].dim
        sizes = [box[dim][1] - box[dim][0] for box in boxes]
        blocks = list(zip(boxes, grad.split(sizes, dim), strict=True))
        boxes = [own_box(windows), *received_boxes(windows)]
        own, *parts = (read(blocks, box) for box in boxes)
        if ctx.copy:  # others may read ``grad``
            own, *parts = (part.clone() for part in (own, *parts))
        finish = return_gradients(list(zip(boxes[1:], parts, strict=True)), windows, own, ctx.label)
        return finish(own), None, None, None, None


def _pieces(windows: Sequence[Window]) -> list[Box]:
    """Return the boxes that a rank copies out."""
    dims = [window.dim for window in windows]
    pieces = itertools.product(*(window.pieces for window in windows))
    return [dict(zip(dims, spans, strict=True)) for spans in pieces]


def read(blocks: Sequence[Block], box: Box, *, fill: float = 0.0) -> Tensor:
    """Return a box of a tensor of which the blocks are known: a view of one that contains it.

    Positions that no block has get the value ``fill``.
    """
    for place, values in blocks:
        if all(place[dim][0] <= a and b <= place[dim][1] for dim, (a, b) in box.items()):
            return narrowed(values, box, place)
    like = blocks[0][1]
    shape, layout = _box_shape(like, box), memory_format(like)
    out = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
    pairs = [pair for block in blocks if (pair := _common((box, out), block))]
    if sum(part.numel() for _, part in pairs) < out.numel():
        out.fill_(fill)
    for target, part in pairs:
        target.copy_(part)
    return out


def _common(first: Block, second: Block) -> tuple[Tensor, Tensor] | None:
    """Return views of two blocks at the positions that both have."""
    box: Box = {}
    for dim, span in first[0].items():
        part = overlap(span, second[0][dim])
        if part is None:
            return None
        box[dim] = part
    return narrowed(first[1], box, first[0]), narrowed(second[1], box, second[0])


def _box_shape(like: Tensor, box: Box) -> list[int]:
    shape = list(like.shape)
    for dim, (start, stop) in box.items():
        shape[dim] = stop - start
    return shape


def narrowed(x: Tensor, box: Box, place: Box) -> Tensor:
    """Return the view of a box of a tensor whose own box is ``place``."""
    for dim, (start, stop) in box.items():
        if (start, stop) != place[dim]:
            x = x.narrow(dim, start - place[dim][0], stop - start)
    return x


def memory_format(x: Tensor) -> torch.memory_format:
    """Return how a tensor lies in memory: channels last, or contiguous."""
    for ndim, kind in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == ndim and x.is_contiguous(memory_format=kind) and not x.is_contiguous():
            return kind
    return torch.contiguous_format
