"""Rows that a rank needs from others along cut dims: sent point to point, and their gradients back.

What the ranks need of a cut dim is a ``Window``, which all ranks know. The dims are exchanged one
after the other. What the second exchange sends has the rows that came with the first, so that
corners arrive over two neighbours and no byte is sent twice. A rank sends exactly what others need
and do not have: the sum over the ranks is the size of their halos. Padding of a constant is never
sent; it is filled in where a box is copied out.

A rank has blocks: its own part, and one for every interval of rows that it has received. ``Halo``
receives blocks, dim by dim, so that a convolution computes what needs no halo meanwhile.
``HaloGradient`` sends the gradients of the received blocks back to the owners, which add them.
``extend`` and ``fetch_rows`` are both together, as differentiable functions.
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
    """What the ranks need along one cut dim.

    Attributes:
        dim: of the tensor.
        cut: of the dim.
        needs: for each rank, intervals of rows of the tensor.
        span: what this rank copies out, which may exceed the tensor.
    """

    dim: int
    cut: Cut
    needs: Needs
    span: Interval

    @property
    def own_needs(self) -> tuple[Interval, ...]:
        """The intervals that this rank needs."""
        return self.needs[self.cut.axis.rank]

    @property
    def inside(self) -> Interval:
        """The rows of the tensor from the first to the last that this rank needs."""
        if not self.own_needs:
            return self.cut.own[0], self.cut.own[0]
        return self.own_needs[0][0], self.own_needs[-1][1]


def window(dim: int, cut: Cut, spans: Sequence[Interval]) -> Window:
    """Return the window of one span for each rank, in positions that may exceed the tensor."""
    inside = [overlap(span, (0, cut.size)) or (0, 0) for span in spans]
    return Window(dim, cut, single(inside), spans[cut.axis.rank])


def own_box(windows: Sequence[Window]) -> Box:
    """Return the box of this rank's part."""
    return {window.dim: window.cut.own for window in windows}


def rows_box(windows: Sequence[Window], level: int, part: Interval) -> Box:
    """Return the box of rows along one dim, with the halos of the dims before."""
    box = {window.dim: window.inside for window in windows[:level]}
    box[windows[level].dim] = part
    return box | own_box(windows[level + 1 :])


def messages(windows: Sequence[Window], level: int) -> tuple[Messages, Messages]:
    """Return what this rank sends along one dim, and what it receives."""
    cut, needs = windows[level].cut, windows[level].needs
    me = cut.axis.rank
    sends, receives = {}, {}
    for rank in range(cut.axis.size):
        if rank == me:
            continue
        sent = [overlap(cut.own, need) for need in needs[rank]]
        received = [overlap(cut.span(rank), need) for need in needs[me]]
        if any(sent):
            sends[rank] = [rows_box(windows, level, part) for part in sent if part]
        if any(received):
            receives[rank] = [rows_box(windows, level, part) for part in received if part]
    return sends, receives


def received_boxes(windows: Sequence[Window]) -> list[Box]:
    """Return the boxes of ``Halo.received``, in its order."""
    levels = [messages(windows, level)[1] for level in range(len(windows))]
    return [box for receives in levels for boxes in receives.values() for box in boxes]


def _exchange(
    windows: Sequence[Window],
    level: int,
    sends: dict[int, list[Tensor]],
    receives: Messages,
    like: Tensor,
    label: str,
) -> Pending:
    """Start the exchange of a dim; ``like`` is a tensor of the shape of this rank's part."""
    window = windows[level]
    flat = {
        rank: torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0]
        for rank, parts in sends.items()
    }
    counts = {
        rank: sum(math.prod(box_shape(like, box)) for box in boxes)
        for rank, boxes in receives.items()
    }
    most = (0, most_rows(window.cut.spans(), window.needs))
    return collectives.exchange(
        {rank: part.contiguous() for rank, part in flat.items()},
        counts,
        window.cut.axis.group,
        longest=math.prod(box_shape(like, rows_box(windows, level, most))),
        like=like,
        label=f"{label} {window.cut.axis.name}",
    )


def _arrived(pending: Pending, receives: Messages, like: Tensor) -> list[Block]:
    """Wait for the blocks of an exchange."""
    boxes = [box for some in receives.values() for box in some]
    shapes = [box_shape(like, box) for box in boxes]
    parts = pending.wait().split([math.prod(shape) for shape in shapes])
    return [(box, part.view(shape)) for box, shape, part in zip(boxes, shapes, parts, strict=True)]


class Halo:
    """A tensor, and the rows of others around it, dim by dim.

    Args:
        x: this rank's part.
        windows: what is needed, one for each cut dim that needs something.
        received: what an earlier exchange of the same windows has received.
        fill: the value of positions outside of the tensor.
        label: of the messages in the log.
    """

    def __init__(
        self,
        x: Tensor,
        windows: Sequence[Window],
        *,
        received: Sequence[Tensor] = (),
        fill: float = 0.0,
        label: str = "halo",
    ) -> None:
        self.x, self.windows, self.fill, self.label = x, windows, fill, label
        self.blocks: list[Block] = [(own_box(windows), x)]
        if received:
            self.blocks += zip(received_boxes(windows), received, strict=True)
        self._level = 0
        self._receives: Messages = {}
        self._pending: Pending | None = None

    @property
    def received(self) -> list[Tensor]:
        """The received rows."""
        return [values for _, values in self.blocks[1:]]

    def start(self) -> None:
        """Send the rows that others need along the next dim, if there is one."""
        if self._level == len(self.windows):
            return
        sends, self._receives = messages(self.windows, self._level)
        sent = {rank: [read(self.blocks, box) for box in boxes] for rank, boxes in sends.items()}
        self._pending = _exchange(
            self.windows, self._level, sent, self._receives, self.x, self.label
        )

    def advance(self, level: int) -> None:
        """Wait until so many dims have arrived; each one starts the next."""
        while self._level < level:
            assert self._pending is not None
            self.blocks += _arrived(self._pending, self._receives, self.x)
            self._level += 1
            self.start()

    def exchange(self) -> None:
        """Exchange all dims."""
        self.start()
        self.advance(len(self.windows))

    def read(self, box: Box) -> Tensor:
        """Return a box of the extended tensor, maybe a view of this rank's part."""
        return read(self.blocks, box, fill=self.fill)

    def everything(self) -> Tensor:
        """Return all that this rank needs; intervals of one window in ascending order."""
        boxes = needed_boxes(self.windows)
        parts = [self.read(box) for box in boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.windows[0].dim)


def needed_boxes(windows: Sequence[Window]) -> list[Box]:
    """Return the boxes of ``Halo.everything``: several only where one window has intervals."""
    if len(windows) == 1 and len(windows[0].own_needs) > 1:
        return [{windows[0].dim: interval} for interval in windows[0].own_needs]
    return [{window.dim: window.span for window in windows}]


def split_gradient(grad: Tensor, windows: Sequence[Window]) -> tuple[Tensor, list[Tensor]]:
    """Split the gradient of ``Halo.everything`` into that of the own part and of received rows.

    Returns:
        Maybe views of ``grad``, in the order of ``Halo.received``.
    """
    boxes = needed_boxes(windows)
    blocks: list[Block] = [(boxes[0], grad)]
    if len(boxes) > 1:
        sizes = [interval[1] - interval[0] for interval in windows[0].own_needs]
        blocks = list(zip(boxes, grad.split(sizes, windows[0].dim), strict=True))
    parts = [read(blocks, box) for box in received_boxes(windows)]
    return read(blocks, own_box(windows)), parts


class HaloGradient:
    """Gradients of received rows on their way to the owners, which add them.

    Args:
        like: a tensor of the shape and dtype of this rank's part.
        parts: the gradients of what ``Halo.received`` has; they are changed.
        windows: those of the halo.
        label: of the messages in the log.
    """

    def __init__(
        self,
        like: Tensor,
        parts: Sequence[Tensor],
        windows: Sequence[Window],
        *,
        label: str = "halo grad",
    ) -> None:
        self.windows, self.label, self._like = windows, label, like
        self._blocks = list(zip(received_boxes(windows), parts, strict=True))
        self._level = len(self.windows)
        self._pending: Pending | None = None
        self._receives: Messages = {}

    def start(self) -> None:
        """Send the gradients of the last dim that is left."""
        if self._level == 0:
            return
        # What the forward has sent comes back, and what it has received is sent.
        self._receives, sends = messages(self.windows, self._level - 1)
        first = len(self._blocks) - sum(map(len, sends.values()))
        parts = iter(self._blocks[first:])
        sent = {rank: [next(parts)[1] for _ in boxes] for rank, boxes in sends.items()}
        del self._blocks[first:]
        self._pending = _exchange(
            self.windows, self._level - 1, sent, self._receives, self._like, self.label
        )

    def finish(self, own: Tensor) -> Tensor:
        """Exchange all dims, add what arrives to the gradient of this rank's part, return that.

        Some of what arrives is of rows that this rank received along dims before, and sends back
        next.
        """
        while self._level:
            if self._pending is None:
                self.start()
            assert self._pending is not None
            blocks = [(own_box(self.windows), own), *self._blocks]
            for box, values in _arrived(self._pending, self._receives, self._like):
                for block in blocks:
                    if common := _common(block, (box, values)):
                        common[0].add_(common[1])
            self._pending = None
            self._level -= 1
        return own


def extend(
    x: Tensor, windows: Sequence[Window], *, fill: float = 0.0, label: str = "halo"
) -> Tensor:
    """Return this rank's part with what it needs around it; differentiable."""
    if all(w.span == w.cut.own and most_rows(w.cut.spans(), w.needs) == 0 for w in windows):
        return x
    return _FetchRows.apply(x, tuple(windows), fill, label)


def fetch_rows(x: Tensor, dim: int, cut: Cut, needs: Needs, *, label: str = "rows") -> Tensor:
    """Return the rows that this rank needs, in ascending order; differentiable."""
    mine = needs[cut.axis.rank]
    span = (mine[0][0], mine[-1][1]) if mine else (cut.own[0], cut.own[0])
    return _FetchRows.apply(x, (Window(dim, cut, needs, span),), 0.0, label)


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Any, fill: float, label: str) -> Tensor:
        ctx.windows, ctx.label = windows, label
        halo = Halo(x, windows, fill=fill, label=label)
        halo.exchange()
        out = halo.everything()
        # A view could not be changed in place by the caller.
        return out.clone() if out is x or out._is_view() else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        own, parts = split_gradient(grad, ctx.windows)
        own, parts = own.clone(), [part.clone() for part in parts]  # others may read ``grad``
        back = HaloGradient(own, parts, ctx.windows, label=f"{ctx.label} grad")
        return back.finish(own), None, None, None


def read(blocks: Sequence[Block], box: Box, *, fill: float = 0.0) -> Tensor:
    """Return a box of a tensor of which the blocks are known: a view of one that contains it.

    Positions that no block has get the value ``fill``.
    """
    for place, values in blocks:
        if all(place[dim][0] <= a and b <= place[dim][1] for dim, (a, b) in box.items()):
            return narrowed(values, box, place)
    like = blocks[0][1]
    out = torch.empty(
        box_shape(like, box),
        dtype=like.dtype,
        device=like.device,
        memory_format=memory_format(like),
    )
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


def box_shape(like: Tensor, box: Box) -> list[int]:
    """Return the shape of a box of a tensor."""
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
