"""The plan of a step, made from what a step of the same shapes allocated.

Times are positions: the number of buffers that the step had allocated before. A buffer that was
freed before the next allocation lives in ``[n, n + 1)``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fusedops.memory.arena.placement import Placement, most_alive, place

# Bytes, by the type of the device; as csrc/runtime/arena/step_arena.h.
ALIGNMENT = {"cpu": 64, "cuda": 512}
_OUTSIDE = -1
_ALIVE = -1

Interval = tuple[int, int]


@dataclass(frozen=True)
class StepRecord:
    """What a step allocated, in order.

    Attributes:
        sizes: bytes of each buffer, aligned.
        ends: the position before which it was freed; -1: it is alive.
        in_next: 1: the end is a position of the next step.
        marks: positions at which forwards of the model began.
    """

    sizes: list[int]
    ends: list[int]
    in_next: list[int]
    marks: list[int]

    def similarity(self, sizes: list[int]) -> float:
        """Return the share of the bytes that another step has in buffers of the same sizes."""
        mine, other = Counter(self.sizes), Counter(sizes)
        total = max(sum(self.sizes), sum(sizes))
        common = sum(size * count for size, count in (mine & other).items())
        return common / total if total else 1.0


@dataclass(frozen=True)
class StepPlan:
    """Where the buffers of a step lie.

    Attributes:
        sizes: bytes of each buffer of the step.
        offsets: in the block, in bytes; -1: outside of it.
        marks: positions at which forwards begin.
        lifetimes: of the buffers in the block, with their indices: a buffer that is freed in the
            next step has two, one at the end and one at the begin of the step.
        placement: of these lifetimes.
        peak: the most bytes that the step has alive, those outside of the block included.
    """

    sizes: list[int]
    offsets: list[int]
    marks: list[int]
    lifetimes: list[tuple[int, Interval]]
    placement: Placement
    peak: int


def plan_step(
    record: StepRecord, *, complete: bool, seconds: float, alignment: int = ALIGNMENT["cpu"]
) -> StepPlan:
    """Place the buffers of a step.

    Buffers that outlive their step by another one, or of which the end is not known, lie outside.

    Args:
        record: of a step.
        complete: whether the next step has ended, too: buffers of the record that were freed in it
            get a place, which no other buffer has until then.
        seconds: how long to search at most.
        alignment: of the offsets, in bytes.
    """
    count = len(record.sizes)
    lifetimes: list[tuple[int, Interval]] = []
    cyclic: list[int] = []
    for index, (end, in_next) in enumerate(zip(record.ends, record.in_next, strict=True)):
        if end != _ALIVE and not in_next:
            lifetimes.append((index, (index, end)))
        elif end != _ALIVE and complete and end <= index:
            cyclic.append(index)
    # Those that are alive between two steps are alive together: they are stacked, first those
    # that are freed last.
    top, pinned = 0, {}
    for index in sorted(cyclic, key=lambda index: -record.ends[index]):
        for piece in ((0, record.ends[index]), (index, count)):
            if piece[0] < piece[1]:
                pinned[len(lifetimes)] = top
                lifetimes.append((index, piece))
        top += record.sizes[index]
    lowers = [begin for _, (begin, _) in lifetimes]
    uppers = [end for _, (_, end) in lifetimes]
    sizes = [record.sizes[index] for index, _ in lifetimes]
    placement = place(lowers, uppers, sizes, alignment=alignment, pinned=pinned, seconds=seconds)
    offsets = [_OUTSIDE] * count
    for (index, _), offset in zip(lifetimes, placement.offsets, strict=True):
        offsets[index] = offset
    outside = [index for index, offset in enumerate(offsets) if offset == _OUTSIDE]
    peak = most_alive(
        [*lowers, *outside],
        [*uppers, *(count for _ in outside)],
        [*sizes, *(record.sizes[index] for index in outside)],
    )
    return StepPlan(record.sizes, offsets, record.marks, lifetimes, placement, peak)
