"""The log of communications: what a rank started and waited for, and what it computed meanwhile.

Inside ``with recorded() as log`` every start and every wait of ``collectives.py`` is an event, and
so is what ``computing()`` encloses: budgets are sums over events, and overlap is proved by their
order, not by a clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import collectives as op_collectives

COMPUTE = "compute"


@dataclass(frozen=True)
class StreamWait:
    """What a CUDA stream waited for a communication, while its host went on."""

    stream: Any
    begin: Any  # timing event that the stream recorded before it waited
    end: Any  # timing event that it recorded afterwards


@dataclass(frozen=True)
class Event:
    """A start or an end, in the order in which they happened on this rank."""

    kind: str  # one of ``collectives.KINDS``, or ``COMPUTE``
    phase: str  # ``"start"`` or ``"end"``
    number: int  # the same for the start and the end of one thing
    label: str  # what the caller called it
    # That this rank sends to others, by the algorithm that sends the fewest: of ``n`` ranks
    # an all-reduce of ``b`` bytes sends ``2 b (n - 1) / n``, an all-gather to ``b`` or a
    # reduce-scatter of ``b`` half of that; a broadcast ``b`` on its source
    bytes: int
    ranks: int  # size of the group
    seconds: float  # the clock, for drawings
    group: str = ""  # name of the process group, where it is known
    blocked: float = 0.0  # of an end: seconds in which the host waited for it
    on_stream: StreamWait | None = None  # of an end, where CUDA is in use


@dataclass
class Log:
    """What one rank communicated while it was open."""

    rank: int
    events: list[Event] = field(default_factory=list)
    # Counters that callers add: ``expert_rows``, which arrived for the experts of this rank
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> list[Event]:
        """The communications, each by its start."""
        return [event for event in self.events if event.phase == "start" and event.kind != COMPUTE]

    def counts(self) -> dict[str, int]:
        """Return how many communications there were of each kind."""
        return dict(Counter(event.kind for event in self.calls))

    def bytes(self, kind: str | None = None) -> int:
        """Return the bytes that this rank sent, of one kind or of all."""
        return sum(event.bytes for event in self.calls if kind in (None, event.kind))

    def overlapped(self) -> list[tuple[str, str]]:
        """Return the labels of communications and of the computations that they enclose."""
        index = {(event.number, event.phase): i for i, event in enumerate(self.events)}
        spans = [
            (event, index[event.number, "start"], index.get((event.number, "end")))
            for event in self.events
            if event.phase == "start"
        ]
        return [
            (outer.label, inner.label)
            for outer, begin, end in spans
            if outer.kind != COMPUTE and end is not None
            for inner, first, last in spans
            if inner.kind == COMPUTE and last is not None and begin < first and last < end
        ]


# Logs that are open in this process, not in this thread: autograd's threads run backward nodes of
# GPUs. Where threads are ranks (tests), each log records its own rank.
_LOGS: list[Log] = []
_LOCK = threading.Lock()
_NUMBERS = itertools.count()


@contextmanager
def recorded() -> Iterator[Log]:
    """Record this rank's communications; gives the log, which stays readable afterwards."""
    log = Log(_rank())
    with _LOCK:
        if not _LOGS:
            op_collectives.listeners.append(_record_op)
        _LOGS.append(log)
    try:
        yield log
    finally:
        with _LOCK:
            _LOGS.remove(log)
            if not _LOGS:
                op_collectives.listeners.remove(_record_op)


@contextmanager
def computing(label: str) -> Iterator[None]:
    """Mark what it encloses as a computation, for the timeline."""
    if not is_recorded():
        yield
        return
    span = ComputeSpan(label)
    span.mark("start")
    yield
    span.mark("end")


class ComputeSpan:
    """A computation whose start and end are marked from two places."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._number = next(_NUMBERS)

    def mark(self, phase: str) -> None:
        """Mark the ``"start"`` or the ``"end"``."""
        _mark(Event(COMPUTE, phase, self._number, self._label, 0, 1, time.perf_counter()))


def note(name: str, value: int) -> None:
    """Add to a number of the logs that are open."""
    for log in _own_logs():
        log.notes[name] += value


def is_recorded() -> bool:
    """Whether a log is open in this process."""
    return bool(_LOGS)


def record_start(kind: str, label: str, sent: int, group: dist.ProcessGroup) -> Event | None:
    """Record the start of a communication of which this rank sends so many bytes."""
    if not _LOGS:
        return None
    now, name = time.perf_counter(), group.group_name
    event = Event(kind, "start", next(_NUMBERS), label, sent, group.size(), now, name)
    _mark(event)
    return event


def wait_recorded(started: Event, finish: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return ``finish()``, and record the end of the communication that it waits for."""
    since, begin = time.perf_counter(), stream_event()
    result = finish()
    end = stream_event()
    wait = None if end is None else StreamWait(torch.cuda.current_stream(), begin, end)
    _record_end(started, since, wait)
    return result


def stream_event() -> Any:
    """Return a timing event that the current CUDA stream has recorded.

    It is ``None`` where this process does not use CUDA, and while a CUDA graph is captured.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _record_end(started: Event, since: float, wait: StreamWait | None = None) -> None:
    now = time.perf_counter()
    blocked = now - since
    _mark(replace(started, phase="end", bytes=0, seconds=now, blocked=blocked, on_stream=wait))


def _record_op(kind: str, label: str, sent: int, ranks: int) -> None:
    """Record a collective of an op below this package, which has no wait of its own."""
    if ranks > 1:
        now = time.perf_counter()
        started = Event(kind, "start", next(_NUMBERS), label, sent, ranks, now)
        _mark(started)
        _record_end(started, now)


def _mark(event: Event) -> None:
    for log in _own_logs():
        log.events.append(event)


def _own_logs() -> list[Log]:
    """Return the open logs of this rank."""
    rank = _rank() if _LOGS else 0
    return [log for log in _LOGS if log.rank == rank]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
