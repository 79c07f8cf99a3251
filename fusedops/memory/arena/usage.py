"""What an arena holds, and what a step needs without it."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from fusedops.memory.arena.placement import Placement
from fusedops.memory.arena.planning import StepPlan


@dataclass(frozen=True)
class StepCounts:
    """Buffers and bytes of the last step, in the order of ``csrc/step_arena.h``."""

    buffers: int
    bytes: int
    served: int
    unplanned: int
    occupied: int
    kept: int
    outside: int
    small: int
    small_bytes: int
    block_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class ArenaReport:
    """What ``StepArena.report`` returns; printing it shows a line per figure.

    Attributes:
        steps: that have ended.
        plans: how many shapes have a plan.
        peak_bytes: the most bytes that the planned step has alive at the same time.
        bound_bytes: below which no block holds the buffers that the block holds.
        block_bytes: of the planned block.
        allocator_bytes: what an allocator needs for the same buffers that does not know when they
            end: a simulated best fit that merges free neighbours and keeps all memory.
        step_bytes: of all buffers of the last step, one after another.
        served_bytes: those of them in the block.
        outside_bytes: the others by reason: ``"escape"`` (they live longer than the next step),
            ``"unplanned"`` (the plan does not have them), ``"occupied"`` (another buffer of the
            step was alive in their place), ``"kept"`` (one of an earlier step was), ``"small"``
            (below 1 KiB).
        boxes: begin and end as positions, first and last offset, of each buffer in the block.
        note: why steps run without a plan; empty where they do not.
    """

    steps: int
    plans: int
    peak_bytes: int
    bound_bytes: int
    block_bytes: int
    allocator_bytes: int
    step_bytes: int
    served_bytes: int
    outside_bytes: dict[str, int]
    boxes: tuple[tuple[int, int, int, int], ...]
    note: str = ""

    @property
    def fragmentation(self) -> float:
        """The share of the block that is empty when it is fullest."""
        return 1 - self.bound_bytes / self.block_bytes if self.block_bytes else 0.0

    @property
    def allocator_fragmentation(self) -> float:
        """The same of the simulated allocator."""
        return 1 - self.bound_bytes / self.allocator_bytes if self.allocator_bytes else 0.0

    def __str__(self) -> str:
        outside = ", ".join(
            f"{reason} {_mib(nbytes)}" for reason, nbytes in self.outside_bytes.items() if nbytes
        )
        lines = [
            f"steps {self.steps}, plans {self.plans}",
            f"peak of a step {_mib(self.peak_bytes)}",
            f"block {_mib(self.block_bytes)}, lower bound {_mib(self.bound_bytes)}, "
            f"fragmentation {self.fragmentation:.2%}",
            f"an allocator without lifetimes {_mib(self.allocator_bytes)}, "
            f"fragmentation {self.allocator_fragmentation:.2%}",
            f"last step: {_mib(self.step_bytes)} allocated, {_mib(self.served_bytes)} in the block",
            f"outside of it: {outside or 'nothing'}",
        ]
        return "\n".join([*lines, *([self.note] if self.note else [])])


def make_report(
    plan: StepPlan | None, counts: StepCounts, *, steps: int, plans: int, note: str
) -> ArenaReport:
    """Return the report of an arena whose last planned step had this plan and these counts."""
    plan = plan or StepPlan([], [], [], [], Placement((), 0, 0), 0)
    placed = zip(plan.lifetimes, plan.placement.offsets, strict=True)
    return ArenaReport(
        steps=steps,
        plans=plans,
        peak_bytes=plan.peak,
        bound_bytes=plan.placement.bound,
        block_bytes=plan.placement.height,
        allocator_bytes=best_fit_bytes(plan),
        step_bytes=counts.bytes + counts.small_bytes,
        served_bytes=counts.served,
        outside_bytes={
            "escape": counts.outside,
            "unplanned": counts.unplanned,
            "occupied": counts.occupied,
            "kept": counts.kept,
            "small": counts.small_bytes,
        },
        boxes=tuple(
            (begin, end, offset, offset + plan.sizes[index])
            for (index, (begin, end)), offset in placed
        ),
        note=note,
    )


def best_fit_bytes(plan: StepPlan) -> int:
    """Return the bytes of a heap that serves two such steps by best fit, the buffers of a block."""
    count = len(plan.sizes)
    ends: dict[int, list[int]] = {}  # buffers of both steps by the time of their end
    lifetimes: dict[int, int] = {}  # how long a buffer lives
    for index, (begin, end) in plan.lifetimes:
        # Of two pieces the one at the begin of the next step has the end.
        lives = end - index if begin == index else end + count - index
        lifetimes[index] = max(lifetimes.get(index, 0), lives)
    heap = _Heap()
    offsets: dict[int, int] = {}
    for time in range(2 * count):
        for buffer in ends.pop(time, ()):
            heap.free(offsets.pop(buffer), plan.sizes[buffer % count])
        index = time % count
        if index in lifetimes:
            offsets[time] = heap.allocate(plan.sizes[index])
            ends.setdefault(time + lifetimes[index], []).append(time)
    return heap.height


class _Heap:
    """Best fit, with free neighbours merged."""

    def __init__(self) -> None:
        self.height = 0
        self._sizes: list[tuple[int, int]] = []  # free ranges, by size and offset
        self._begins: dict[int, int] = {}  # size of a free range, by its offset
        self._ends: dict[int, int] = {}  # the same, by the offset behind it

    def allocate(self, size: int) -> int:
        at = bisect.bisect_left(self._sizes, (size, 0))
        if at == len(self._sizes):
            # The heap grows, by less if its last range is free.
            last = self._ends.get(self.height, 0)
            offset = self.height - last
            if last:
                self._remove(offset, last)
            self.height = offset + size
            return offset
        free, offset = self._sizes[at]
        self._remove(offset, free)
        if free > size:
            self._add(offset + size, free - size)
        return offset

    def free(self, offset: int, size: int) -> None:
        before, after = self._ends.get(offset, 0), self._begins.get(offset + size, 0)
        if before:
            self._remove(offset - before, before)
        if after:
            self._remove(offset + size, after)
        self._add(offset - before, before + size + after)

    def _add(self, offset: int, size: int) -> None:
        bisect.insort(self._sizes, (size, offset))
        self._begins[offset] = self._ends[offset + size] = size

    def _remove(self, offset: int, size: int) -> None:
        del self._sizes[bisect.bisect_left(self._sizes, (size, offset))]
        del self._begins[offset], self._ends[offset + size]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
