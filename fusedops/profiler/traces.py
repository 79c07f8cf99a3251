"""Reads traces of ``torch.profiler``, of any number of ranks, into the times of their steps.

A file is one rank: ``trace.export_chrome_trace`` or ``tensorboard_trace_handler``, ``.json`` or
``.json.gz``. Its rank is that of ``distributedInfo``, else the last number of its name. On a GPU
kernels count; on the CPU the operators that no other operator encloses.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedops.launch.config_table import InputError
from fusedops.profiler.step_table import RankTimes

Interval = tuple[float, float]
_STEP = re.compile(r"ProfilerStep#(\d+)")
_COMMUNICATES = re.compile(r"nccl|gloo|hccl|rccl|mpi|c10d|record_param_comms", re.IGNORECASE)
_BETWEEN_TWO = re.compile(r"send|recv|receive", re.IGNORECASE)
_LOADS = re.compile(r"dataloader", re.IGNORECASE)
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_MICRO = 1e-6


@dataclass
class TraceFile:
    """What one trace shows.

    Attributes:
        rank: of the process.
        times: the mean of its steps; ``None``: it could not be read.
        kernels: seconds and number of calls of each kernel or operator, of all steps.
        note: what is wrong with it; empty: nothing.
    """

    rank: int
    times: RankTimes | None = None
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)
    note: str = ""


def read_traces(folder: str | Path, *, processes: int = 1) -> list[TraceFile]:
    """Read all traces of a folder, in the order of their ranks.

    Args:
        folder: of the files; those in folders below are read as well.
        processes: that read at the same time.

    Raises:
        InputError: there is no trace, or none that can be read.
    """
    names = sorted(Path(folder).rglob("*.json")) + sorted(Path(folder).rglob("*.json.gz"))
    files = [name for name in names if name.name not in ("header.json",)]
    if not files:
        raise InputError(f"{folder} has no traces: torch.profiler writes them as *.json")
    jobs = list(enumerate(files))
    if processes > 1 and len(jobs) > 1:
        with ProcessPoolExecutor(processes) as pool:
            traces = list(pool.map(_read, jobs, chunksize=8))
    else:
        traces = [_read(job) for job in jobs]
    if all(trace.times is None for trace in traces):
        raise InputError(f"{folder} has no trace that can be read: {traces[0].note}")
    return sorted(traces, key=lambda trace: trace.rank)


def _read(job: tuple[int, Path]) -> TraceFile:
    number, path = job
    try:
        data = path.read_bytes()
        record = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return TraceFile(_rank_in(path.name, number), note=f"{path.name} is damaged: {error}")
    events = record.get("traceEvents") if isinstance(record, dict) else record
    if not isinstance(events, list):
        return TraceFile(_rank_in(path.name, number), note=f"{path.name} is no trace")
    information = record.get("distributedInfo", {}) if isinstance(record, dict) else {}
    rank = information.get("rank", _rank_in(path.name, number))
    return _trace(rank, path.name, events)


def _rank_in(name: str, number: int) -> int:
    numbers = re.findall(r"rank[-_]?(\d+)", name) or re.findall(r"\d+", name.split(".")[0])
    return int(numbers[-1]) if numbers else number


def _trace(rank: int, name: str, events: Sequence[dict[str, Any]]) -> TraceFile:
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [_interval(event) for event in complete if _STEP.fullmatch(str(event.get("name", "")))]
    work = [event for event in complete if event.get("cat") in _KERNELS]
    if not work:
        work = _outermost([event for event in complete if event.get("cat") == "cpu_op"])
    if not work:
        return TraceFile(rank, note=f"{name} has neither kernels nor operators")
    if not steps:
        spans = [_interval(event) for event in work]
        steps = [(min(begin for begin, _ in spans), max(end for _, end in spans))]
    totals: Counter[str] = Counter()
    kernels: dict[str, tuple[float, int]] = {}
    kinds: dict[str, list[Interval]] = {"compute": [], "communication": [], "pair": [], "data": []}
    for event in complete:
        if _LOADS.search(str(event.get("name", ""))) and event.get("cat") != "kernel":
            kinds["data"].append(_interval(event))
    for event in work:
        word = str(event.get("name", ""))
        span = _interval(event)
        seconds, calls = kernels.get(word, (0.0, 0))
        kernels[word] = (seconds + span[1] - span[0], calls + 1)
        if not _COMMUNICATES.search(word):
            kinds["compute"].append(span)
            continue
        kinds["communication"].append(span)
        if _BETWEEN_TWO.search(word):
            kinds["pair"].append(span)
    unions = {kind: union(spans) for kind, spans in kinds.items()}
    for step in steps:
        _add_step(totals, step, unions)
    mean = {kind: seconds / len(steps) for kind, seconds in totals.items()}
    return TraceFile(rank, RankTimes(rank=rank, stage=0, **mean), kernels)


def _add_step(totals: Counter[str], step: Interval, unions: dict[str, list[Interval]]) -> None:
    inside = {kind: clipped(spans, step) for kind, spans in unions.items()}
    compute, communication = inside["compute"], inside["communication"]
    exposed = minus(communication, compute)
    waiting = minus(inside["pair"], compute)
    preparing = minus(inside["data"], union([*compute, *communication]))
    busy = length(union([*compute, *communication])) + length(preparing)
    values = {
        "step": step[1] - step[0],
        "computing": length(compute),
        "communication": length(communication),
        "not_overlapped": length(exposed),
        "bubble": length(waiting),
        "preparing": length(preparing),
        "free": max(0.0, step[1] - step[0] - busy),
    }
    for name, seconds in values.items():
        totals[name] += seconds  # type: ignore[assignment]


def _interval(event: dict[str, Any]) -> Interval:
    begin = float(event["ts"]) * _MICRO
    return begin, begin + float(event["dur"]) * _MICRO


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operators that no other operator of their thread encloses."""
    outer = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        thread, begin = event.get("tid"), float(event["ts"])
        if begin >= ends.get(thread, -1.0):
            outer.append(event)
            ends[thread] = begin + float(event["dur"])
    return outer


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not touch, in order.

    Example:
        >>> from fusedops.profiler.traces import union
        >>> union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
        [(0.0, 3.0), (5.0, 6.0)]
    """
    result: list[Interval] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def minus(spans: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time of disjoint intervals that none of the others covers; both in order.

    Example:
        >>> from fusedops.profiler.traces import length, minus
        >>> length(minus([(50.0, 187.0)], [(0.0, 100.0)]))
        87.0
    """
    result: list[Interval] = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at, number = begin, place
        while number < len(others) and others[number][0] < end:
            if others[number][0] > at:
                result.append((at, others[number][0]))
            at = max(at, others[number][1])
            number += 1
        if at < end:
            result.append((at, end))
    return result


def clipped(spans: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals inside another one."""
    first, last = window
    return [
        (max(begin, first), min(end, last)) for begin, end in spans if end > first and begin < last
    ]


def length(spans: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - begin for begin, end in spans)
