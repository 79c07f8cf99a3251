"""A measurement under way: its conditions, what its rows are measured with, and its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusedops.bench import limits, machine
from fusedops.bench.results import BenchRecord, BenchRow
from fusedops.runtime import host
from fusedops.runtime.timer import Clock, TimingPlan, clock_for
from fusedops.terminal.progress import sigterm_interrupts, steps

ALLOCATORS = ("tuned", "system")


@dataclass(frozen=True)
class Conditions:
    """Under which all variants are measured."""

    dtypes: list[str]  # names of dtypes
    device: torch.device  # where
    seconds: float  # time of a row
    threads: int = 0  # of the CPU; 0: one per physical core
    allocator: str = "tuned"  # a name of ``ALLOCATORS``
    quick: bool = False  # few samples

    def set_up(self) -> list[torch.dtype]:
        """Set threads and allocator of this process; return the dtypes."""
        torch.set_num_threads(self.threads or host.physical_cores())
        if self.allocator == "tuned":
            host.tune_host(threads=torch.get_num_threads())
        return [getattr(torch, name) for name in self.dtypes]

    def timing(self, least: int = 5, most: int = 15) -> TimingPlan:
        """Return the plan of the timer; ``least`` and ``most``: rounds of a first look."""
        if not self.quick:
            return TimingPlan(seconds=self.seconds)
        return TimingPlan(least, most, self.seconds / 4)


@dataclass(frozen=True)
class BenchSettings:
    """Where rows are measured, and how."""

    device: torch.device  # where
    clock: Clock  # of the device
    plan: TimingPlan  # how long each row is timed
    limits: limits.Limits  # of the machine
    compiled: bool  # include torch.compile of what is stock
    allocator: str  # what the process was set to
    cache_bytes: int  # size of the last cache
    report: Callable[[str], None]  # is called with what is being measured
    only: Sequence[str] = ()  # contenders of an op to keep with eager; empty keeps all
    # time the reference and the automatically chosen backend of an op by name too
    all_backends: bool = False
    memory: bool = True  # measure the peak of a model too
    calibrate: bool = False  # patch a model with ``calibrate=True``, on a batch of the case


# A title, and what then measures rows.
Job = tuple[str, Callable[[BenchSettings], None]]


class BenchRun:
    """Measures job by job.

    Attributes:
        rows: those measured so far.
        notes: what could not be measured so far, and why.
    """

    def __init__(
        self, conditions: Conditions, timing: TimingPlan, *, compiled: bool, **settings: Any
    ) -> None:
        """Set the process up; ``settings`` are further ones of the record."""
        self.rows: list[BenchRow] = []
        self.notes: list[str] = []
        self.dtypes = conditions.set_up()
        self.device, self._timing = conditions.device, timing
        self._here = machine.describe(conditions.device)
        self._settings = {
            "allocator": conditions.allocator,
            "dtypes": conditions.dtypes,
            "compile": compiled,
            **settings,
        }

    def run(self, jobs: Sequence[Job], **options: Any) -> bool:
        """Do the jobs, with further ``options`` of ``BenchSettings``.

        Returns:
            Whether that is all: an interrupt keeps the rows of the jobs before it.
        """
        clock = clock_for(self.device)
        with steps(1 + len(jobs)) as progress, sigterm_interrupts():
            progress.describe("limits of this machine")
            self._limits = limits.measure_limits(self.device, self.dtypes, clock)
            progress.advance()
            for title, measure in jobs:
                settings = BenchSettings(
                    device=self.device,
                    clock=clock,
                    plan=self._timing,
                    limits=self._limits,
                    compiled=self._settings["compile"],
                    allocator=self._settings["allocator"],
                    cache_bytes=self._here["cache_bytes"],
                    report=progress.reporter(title),
                    **options,
                )
                try:
                    measure(settings)
                    progress.advance()
                except KeyboardInterrupt:
                    if not self.rows:
                        raise
                    self.notes.append(f"interrupted at {title}: what was measured before is here")
                    return False
        return True

    def record(self) -> BenchRecord:
        """Return the record of what was measured so far."""
        here, plan = self._here, self._timing
        if here["device"] == "cuda":
            # The first state is of an idle GPU, this one of a warm one.
            here = here | {"gpu_state_after": machine.gpu_state()}
        rounds = {"least_rounds": plan.least, "most_rounds": plan.most}
        return BenchRecord(
            machine=here,
            versions=machine.versions(),
            git=machine.git_commit(),
            settings=self._settings | {"seconds": plan.seconds} | rounds,
            limits=asdict(self._limits),
            rows=tuple(self.rows),
            notes=tuple(dict.fromkeys(self.notes)),
            created=machine.now(),
        )
