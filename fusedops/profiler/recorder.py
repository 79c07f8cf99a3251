"""Times the sections of every step of a rank, and gathers the rows of all ranks.

The clock is the host's. On a GPU, where sections end before their kernels do, a section's time is
that of starting its kernels and of waiting for results.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.parallel.comm import host_groups
from fusedops.parallel.comm.collectives import COMPUTE, Log
from fusedops.profiler.timings import FIELDS, GROUPS, REGULAR, SECTIONS, RunShape, column

# Of a step: called on the first rank with its number and the rows of all ranks.
StepHandler = Callable[[int, torch.Tensor], None]


class StepRecorder:
    """Times steps of this rank; every few steps the first rank gets the rows of all ranks.

    Args:
        shape: of the run.
        groups: names of this rank's process groups by their kind, of ``GROUPS``; a collective of
            another group counts as one of ``world``.
        every: steps between two gatherings, each of 100 bytes per step and rank.
        handler: of the rows of all ranks, on the first rank.

    Raises:
        ValueError: ``every`` is less than 1.

    Example:
        >>> from fusedops.profiler import RunShape, StepRecorder
        >>> sizes = dict(pp=1, dp=1, cp=1, tp=1, ep=1)
        >>> recorder = StepRecorder(RunShape(sizes), every=1, handler=lambda step, rows: None)
        >>> with recorder, recorder.step(1):
        ...     with recorder.section("forward"):
        ...         pass
    """

    def __init__(
        self,
        shape: RunShape,
        *,
        groups: Mapping[str, str] | None = None,
        every: int = 5,
        handler: StepHandler | None = None,
    ) -> None:
        checks.integer("StepRecorder", "every", every, least=1)
        self.shape, self.every, self.handler = shape, every, handler
        self._kinds = {name: kind for kind, name in (groups or {}).items()}
        self._rows: list[tuple[int, list[float]]] = []
        # Sections of the step that runs: name, begin, end.
        self._spans: list[tuple[str, float, float]] = []
        self._pause = self._collecting = 0.0
        self._counts: dict[str, float] = {}
        self._irregular = False  # whether a validation or a checkpoint is under way
        self._waited: list[tuple[str, float, float]] = []  # group, end and length of waits
        self.number, self._began = 0, 0.0

    def __enter__(self) -> StepRecorder:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_collection)

    @contextlib.contextmanager
    def step(self, number: int, log: Log | None = None) -> Iterator[None]:
        """Time a step.

        Args:
            number: of the step.
            log: of its collectives: ``fusedops.parallel.comm.collectives.recorded``.
        """
        self.begin(number)
        yield
        self.end(log)

    def begin(self, number: int) -> None:
        """Begin a step, as ``step`` does."""
        self._spans, self._waited, self._pause, self._counts = [], [], 0.0, {}
        self._irregular = False
        self.number, self._began = number, time.perf_counter()

    def end(self, log: Log | None = None) -> None:
        """End the step that was begun; every few steps all ranks gather their rows here."""
        self._rows.append((self.number, self._row(time.perf_counter() - self._began, log)))
        if self.number % self.every == 0:
            self.flush()

    def add(self, section: str, begin: float, end: float) -> None:
        """Add a section that has ended already, by ``time.perf_counter``."""
        checks.choice("StepRecorder.add", "section", section, SECTIONS)
        self._spans.append((section, begin, end))

    def waited(self, group: str, seconds: float) -> None:
        """Add a wait that ends now, for others of a process group: a name of ``GROUPS``."""
        checks.choice("StepRecorder.waited", "group", group, GROUPS)
        self._waited.append((group, time.perf_counter(), seconds))

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section of the step, one of ``SECTIONS``.

        A section inside another is not counted in the outer one, but for those inside
        ``validation`` and ``checkpoint``, which count as these. What is in none is ``other``.
        """
        if name not in SECTIONS:
            checks.choice("StepRecorder.section", "name", name, SECTIONS)
        if self._irregular:
            yield
            return
        place, self._irregular = len(self._spans), name not in REGULAR
        self._spans.append((name, time.perf_counter(), math.inf))
        try:
            yield
        finally:
            self._irregular = False
            self._spans[place] = (*self._spans[place][:2], time.perf_counter())

    def count(self, **counts: float) -> None:
        """Add to ``tokens``, ``pairs`` or ``expert_rows`` of the step, but not in a validation."""
        if self._irregular:
            return
        for name, value in counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + value

    def flush(self) -> None:
        """Gather the rows since the last time, on all ranks, and call the handler on the first."""
        steps = [step for step, _ in self._rows]
        rows = torch.tensor([row for _, row in self._rows], dtype=torch.float32)
        self._rows = []
        if not steps:
            return
        if self.shape.ranks == 1:
            parts = [rows]
        else:
            first = dist.get_rank() == 0
            parts = [torch.empty_like(rows) for _ in range(self.shape.ranks)] if first else []
            dist.gather(rows, parts or None, group=_host_group())
        if parts and self.handler is not None:
            for step, of_ranks in zip(steps, torch.stack(parts, dim=1), strict=True):
                self.handler(step, of_ranks)

    def _row(self, seconds: float, log: Log | None) -> list[float]:
        row = [0.0] * len(FIELDS)
        row[column("step")], row[column("gc")] = seconds, self._pause
        notes = {} if log is None else log.notes
        for name, value in [*self._counts.items(), *notes.items()]:
            row[column(name)] += value
        waits = self._waits(log, row)
        for name, value in own_seconds(self._spans, waits).items():
            row[column(name)] = value
        sections = sum(row[column(name)] for name in SECTIONS)
        blocked = sum(wait for _, wait in waits)
        row[column("other")] = max(0.0, seconds - sections - blocked)
        row[column("memory")] = self._memory()
        return row

    def _waits(self, log: Log | None, row: list[float]) -> list[tuple[float, float]]:
        """Add all collectives to a row; return when each wait ended, and its seconds."""
        waits = []
        for kind, end, seconds in self._waited:
            row[column(f"blocked_{kind}")] += seconds
            waits.append((end, seconds))
        for event in log.events if log is not None else ():
            if event.kind == COMPUTE:
                continue
            kind = self._kinds.get(event.group, "world")
            if event.phase == "start":
                row[column(f"bytes_{kind}")] += event.bytes
            else:
                row[column(f"blocked_{kind}")] += event.blocked
                waits.append((event.seconds, event.blocked))
        return waits

    def _memory(self) -> int:
        if self.shape.device == "cuda":
            return torch.cuda.memory_allocated()
        return resident_bytes()

    def _on_collection(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._pause += time.perf_counter() - self._collecting


def resident_bytes() -> int:
    """Return the bytes of this process in memory; its peak where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def own_seconds(
    spans: list[tuple[str, float, float]], waits: list[tuple[float, float]]
) -> dict[str, float]:
    """Return the seconds of sections without waits and without the sections inside them.

    Args:
        spans: name, begin and end of each section, in the order of their begins.
        waits: end and length of each wait.

    Example:
        >>> from fusedops.profiler.recorder import own_seconds
        >>> own_seconds([("backward", 0.0, 8.0), ("forward", 1.0, 4.0)], [(3.0, 1.0), (7.5, 2.0)])
        {'backward': 3.0, 'forward': 2.0}
    """
    own: dict[str, float] = {}
    for number, (name, begin, end) in enumerate(spans):
        own[name] = own.get(name, 0.0) + end - begin
        outer = _innermost(spans[:number], begin)
        if outer is not None:
            own[outer] -= end - begin
    for when, seconds in waits:
        inside = _innermost(spans, when)
        if inside is not None:
            own[inside] -= seconds
    return {name: max(0.0, seconds) for name, seconds in own.items()}


def _innermost(spans: list[tuple[str, float, float]], moment: float) -> str | None:
    """Return the last section to begin of those that enclose a moment."""
    names = [name for name, begin, end in spans if begin <= moment < end]
    return names[-1] if names else None


def _host_group() -> dist.ProcessGroup:
    """Return a group of all ranks on the hosts' network: a gathering waits for no GPU."""
    world = dist.group.WORLD
    assert world is not None
    return host_groups.host_group(world, torch.device("cuda")) or world
