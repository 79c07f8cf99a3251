"""What an arena holds, and what a step needs without it."""

from __future__ import annotations

from dataclasses import dataclass

from fusedops.memory.arena.placement import Placement
from fusedops.memory.arena.planning import StepPlan


@dataclass(frozen=True)
class StepCounts:
    """Buffers and bytes of the last step, in the order of ``csrc/runtime/arena/step_arena.h``."""

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
    step_bytes: int
    served_bytes: int
    outside_bytes: dict[str, int]
    boxes: tuple[tuple[int, int, int, int], ...]
    note: str = ""

    @property
    def fragmentation(self) -> float:
        """The share of the block that is empty when it is fullest."""
        return 1 - self.bound_bytes / self.block_bytes if self.block_bytes else 0.0

    def __str__(self) -> str:
        outside = ", ".join(
            f"{reason} {_mib(nbytes)}" for reason, nbytes in self.outside_bytes.items() if nbytes
        )
        lines = [
            f"steps {self.steps}, plans {self.plans}",
            f"peak of a step {_mib(self.peak_bytes)}",
            f"block {_mib(self.block_bytes)}, lower bound {_mib(self.bound_bytes)}, "
            f"fragmentation {self.fragmentation:.2%}",
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


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
