"""What ``bench run`` and ``bench models`` share: a record is measured job by job, and delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fusedops.bench import limits, machine
from fusedops.bench.cases import BenchSettings
from fusedops.bench.conditions import Conditions
from fusedops.bench.results import BenchRecord, BenchRow, record_of
from fusedops.cli.bench import options
from fusedops.cli.output import write_all
from fusedops.runtime.timer import TimingPlan, clock_for
from fusedops.terminal.console import console
from fusedops.terminal.progress import steps

# A title, and what then measures rows.
Job = tuple[str, Callable[[BenchSettings], None]]


class BenchRecorder:
    """A record under way.

    Attributes:
        rows: those measured so far.
        notes: what could not be measured so far, and why.
    """

    def __init__(
        self, conditions: Conditions, timing: TimingPlan, *, compiled: bool, **settings: Any
    ) -> None:
        self.rows: list[BenchRow] = []
        self.notes: list[str] = []
        self.dtypes = conditions.set_up()
        self.device, self._timing, self._compiled = conditions.device, timing, compiled
        self._here = machine.describe(conditions.device)
        self._settings = {
            "allocator": conditions.allocator,
            "dtypes": conditions.dtypes,
            "compile": compiled,
            **settings,
        }

    def run(self, jobs: Sequence[Job]) -> bool:
        """Do the jobs; return whether that is all: an interrupt keeps the rows of those before."""
        clock = clock_for(self.device)
        with steps(1 + len(jobs)) as progress, options.sigterm_interrupts():
            progress.describe("limits of this machine")
            self._limits = limits.measure_limits(self.device, self.dtypes, clock)
            progress.advance()
            for title, measure in jobs:
                settings = BenchSettings(
                    device=self.device,
                    clock=clock,
                    plan=self._timing,
                    limits=self._limits,
                    compiled=self._compiled,
                    allocator=self._settings["allocator"],
                    cache_bytes=self._here["cache_bytes"],
                    report=options.reporter(progress, title),
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
        return record_of(
            self._here, self._timing, self._limits, self.rows, self.notes, **self._settings
        )


def deliver(
    record: BenchRecord,
    show: Callable[[BenchRecord, Console], None],
    *writers: tuple[Path | None, Callable[[Path, BenchRecord], object]],
) -> None:
    """Show the record, then write what was asked for: a full disk must not cost the table."""

    def of_record(write: Callable[[Path, BenchRecord], object]) -> Callable[[Path], object]:
        return lambda path: write(path, record)

    out = console()
    show(record, out)
    write_all([(path, of_record(write)) for path, write in writers], out)
