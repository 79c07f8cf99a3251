"""Times the sections of every step of a rank, and gathers the rows of all ranks.

On a CPU the clock is the host's. On a GPU sections and waits are between timing events of the
stream that computes, and no step waits for them: the row of a step is computed in a later one, as
soon as the device has completed its events.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.parallel.comm import host_groups
from fusedops.parallel.comm.collectives import COMPUTE, Log
from fusedops.parallel.comm.log import stream_event
from fusedops.profiler.timings import FIELDS, GROUPS, REGULAR, SECTIONS, RunShape, column

# Of ``time.perf_counter``, or a timing event of a GPU.
Moment: TypeAlias = Any
# Of a step: called on the first rank with its number and the rows of all ranks.
StepHandler = Callable[[int, torch.Tensor], None]


@dataclass
class _Step:
    """A step: what happened when, and its row but for the seconds."""

    number: int
    begin: Moment
    stream: Any  # that computes; ``None`` on a CPU
    end: Moment = None
    # Name, begin and end of each section, in the order of their begins.
    spans: list[tuple[str, Moment, Moment]] = field(default_factory=list)
    waits: list[tuple[str, Moment, Moment]] = field(default_factory=list)  # by process group
    row: list[float] = field(default_factory=lambda: [0.0] * len(FIELDS))

    def add(self, name: str, value: float) -> None:
        self.row[column(name)] += value


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
        self._on_gpu = shape.device == "cuda"
        self._step: _Step | None = None  # that runs
        self._ended: deque[_Step] = deque()  # those whose rows are not computed yet
        self._rows: list[tuple[int, list[float]]] = []
        self._collecting = 0.0
        self._share: float | None = None
        self._irregular = False  # whether a validation or a checkpoint is under way
        self.number = 0

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
        stream = torch.cuda.current_stream() if self._on_gpu else None
        self.number, self._irregular = number, False
        self._step = _Step(number, self.moment(), stream)

    def end(self, log: Log | None = None) -> None:
        """End the step that was begun; every few steps all ranks gather their rows here.

        On a GPU the row of this step is gathered the next time, because the device still computes
        it. A host that is more than a step ahead of its device waits for it before a gathering.
        """
        step, self._step = self._step, None
        assert step is not None, "begin was not called"
        step.number, step.end = self.number, self.moment()
        self._add_log(step, log)
        self._ended.append(step)
        gathers = self.number % self.every == 0
        self._compute_rows(len(self._ended) - self._on_gpu, waits=gathers)
        if gathers:
            self._gather()

    def moment(self) -> Moment:
        """Return the present moment: of the host's clock, or on a GPU an event of its stream."""
        return stream_event() if self._on_gpu else time.perf_counter()

    def add(self, section: str, begin: Moment, end: Moment) -> None:
        """Add a section to the step that runs: what was between two moments."""
        checks.choice("StepRecorder.add", "section", section, SECTIONS)
        if self._step is not None:
            self._step.spans.append((section, begin, end))

    def add_wait(self, group: str, begin: Moment, end: Moment) -> None:
        """Add a wait for others of a process group, a name of ``GROUPS``, to the step that runs."""
        checks.choice("StepRecorder.add_wait", "group", group, GROUPS)
        if self._step is not None:
            self._step.waits.append((group, begin, end))

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section of the step, one of ``SECTIONS``.

        A section inside another is not counted in the outer one, but for those inside
        ``validation`` and ``checkpoint``, which count as these. What is in none is ``other``.
        """
        if name not in SECTIONS:
            checks.choice("StepRecorder.section", "name", name, SECTIONS)
        step = self._step
        if step is None or self._irregular:
            yield
            return
        place, self._irregular = len(step.spans), name not in REGULAR
        begin = self.moment()
        step.spans.append((name, begin, begin))
        try:
            yield
        finally:
            self._irregular = False
            step.spans[place] = name, begin, self.moment()

    def count(self, **counts: float) -> None:
        """Add to ``tokens``, ``pairs`` or ``expert_rows`` of the step, but not in a validation."""
        if self._step is not None and not self._irregular:
            for name, value in counts.items():
                self._step.add(name, value)

    def blocked_share(self) -> float | None:
        """Return the share of the last complete step in which this rank waited in collectives.

        On a GPU that is a step whose events the device has completed; ``None``: there is none yet.
        """
        self._compute_rows(len(self._ended), waits=False)
        return self._share

    def flush(self) -> None:
        """Gather the rows since the last time, on all ranks, and call the handler on the first.

        The host waits until the device has completed the last step.
        """
        self._compute_rows(len(self._ended), waits=True)
        self._gather()

    def _gather(self) -> None:
        steps = [step for step, _ in self._rows]
        rows = torch.tensor([row for _, row in self._rows], dtype=torch.float32)
        self._rows = []
        if not steps:
            return
        if self.shape.ranks == 1:
            parts = [rows]
        else:
            world, first = dist.group.WORLD, dist.get_rank() == 0
            assert world is not None
            parts = [torch.empty_like(rows) for _ in range(self.shape.ranks)] if first else []
            # On the hosts' network, where gathering waits for no GPU.
            group = host_groups.host_group(world, torch.device("cuda")) or world
            dist.gather(rows, parts or None, group=group)
        if parts and self.handler is not None:
            for step, of_ranks in zip(steps, torch.stack(parts, dim=1), strict=True):
                self.handler(step, of_ranks)

    def _compute_rows(self, count: int, *, waits: bool) -> None:
        """Compute the rows of so many steps, or only of those that the device has completed."""
        for _ in range(count):
            step = self._ended[0]
            if self._on_gpu and not step.end.query():
                if not waits:
                    return
                step.end.synchronize()
            row = _row(self._ended.popleft())
            self._rows.append((step.number, row))
            blocked = sum(row[column(f"blocked_{kind}")] for kind in GROUPS)
            self._share = blocked / max(row[column("step")], 1e-9)

    def _add_log(self, step: _Step, log: Log | None) -> None:
        """Add the notes, the bytes and the waits of a log."""
        for name, value in log.notes.items() if log is not None else ():
            step.add(name, value)
        for event in log.events if log is not None else ():
            if event.kind == COMPUTE:
                continue
            kind, wait = self._kinds.get(event.group, "world"), event.on_stream
            if event.phase == "start":
                step.add(f"bytes_{kind}", event.bytes)
            elif not self._on_gpu:
                step.waits.append((kind, event.seconds - event.blocked, event.seconds))
            # A stream that copies may wait while the step computes.
            elif wait is not None and wait.stream == step.stream:
                step.waits.append((kind, wait.begin, wait.end))

    def _on_collection(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        elif self._step is not None:
            self._step.add("gc", time.perf_counter() - self._collecting)


def _row(step: _Step) -> list[float]:
    """Return the row of a step whose moments are known."""

    def since(moment: Moment) -> float:
        """Return the seconds since the begin of the step."""
        if isinstance(moment, float):
            return moment - step.begin
        return 1e-3 * step.begin.elapsed_time(moment)

    seconds = since(step.end)
    spans = [(name, since(begin), since(end)) for name, begin, end in step.spans]
    waits = [(kind, since(begin), since(end)) for kind, begin, end in step.waits]
    for kind, begin, end in waits:
        step.add(f"blocked_{kind}", end - begin)
    own = own_seconds(spans, [(begin, end) for _, begin, end in waits])
    for name, value in own.items():
        step.add(name, value)
    blocked = sum(end - begin for _, begin, end in waits)
    step.add("step", seconds)
    step.add("other", max(0.0, seconds - sum(own.values()) - blocked))
    return step.row


def own_seconds(
    spans: list[tuple[str, float, float]], waits: Iterable[tuple[float, float]]
) -> dict[str, float]:
    """Return the seconds of sections without waits and without the sections inside them.

    Args:
        spans: name, begin and end of each section, in the order of their begins.
        waits: begin and end of each wait.
    """
    own: dict[str, float] = {}
    for number, (name, begin, end) in enumerate(spans):
        own[name] = own.get(name, 0.0) + end - begin
        outer = _innermost(spans[:number], begin)
        if outer is not None:
            own[outer] -= end - begin
    for begin, end in waits:
        # A wait at the end of a section may end at the same moment.
        inside = _innermost(spans, (begin + end) / 2)
        if inside is not None:
            own[inside] -= end - begin
    return {name: max(0.0, seconds) for name, seconds in own.items()}


def _innermost(spans: list[tuple[str, float, float]], moment: float) -> str | None:
    """Return the last section to begin of those that enclose a moment."""
    names = [name for name, begin, end in spans if begin <= moment < end]
    return names[-1] if names else None
