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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedops.launch.config_table import InputError
from fusedops.profiler.step_table import RankTimes
from fusedops.profiler.trace_links import Collective, collective_of, with_steps

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
        collectives: in the order of their begins, of the first steps; empty: the trace says no
            process groups.
        path: of the file.
        note: what is wrong with it; empty: nothing.
    """

    rank: int
    times: RankTimes | None = None
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    path: Path = Path()
    note: str = ""


def read_traces(folder: str | Path, *, processes: int = 1) -> list[TraceFile]:
    """Read all traces of a folder, in the order of their ranks.

    Args:
        folder: of the files; those in folders below are read as well.
        processes: that read at the same time.

    Raises:
        InputError: there is no trace, or none that can be read.
    """
    files = sorted(Path(folder).rglob("*.json")) + sorted(Path(folder).rglob("*.json.gz"))
    if not files:
        raise InputError(
            f"{folder} has no traces: torch.profiler writes them as *.json; "
            "give the folder that has them"
        )
    jobs = list(enumerate(files))
    if processes > 1 and len(jobs) > 1:
        with ProcessPoolExecutor(processes) as pool:
            traces = list(pool.map(_read, jobs, chunksize=8))
    else:
        traces = [_read(job) for job in jobs]
    if all(trace.times is None for trace in traces):
        raise InputError(
            f"{folder} has no trace that can be read: {traces[0].note}; record them again"
        )
    return sorted(traces, key=lambda trace: trace.rank)


def _read(job: tuple[int, Path]) -> TraceFile:
    number, path = job
    rank = _rank_in(path.name, number)
    try:
        record = load(path)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return TraceFile(rank, path=path, note=f"{path.name} is damaged: {error}")
    events = record.get("traceEvents") if isinstance(record, dict) else record
    if not isinstance(events, list):
        return TraceFile(rank, path=path, note=f"{path.name} is no trace")
    information = record.get("distributedInfo") if isinstance(record, dict) else None
    if isinstance(information, dict) and isinstance(information.get("rank"), int):
        rank = information["rank"]
    try:
        return _trace(rank, path, events)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        note = f"{path.name} is a trace of another format: {type(error).__name__}: {error}"
        return TraceFile(rank, path=path, note=note)


def load(path: Path) -> Any:
    """Return what a trace's JSON file holds, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def _rank_in(name: str, number: int) -> int:
    numbers = re.findall(r"rank[-_]?(\d+)", name) or re.findall(r"\d+", name.split(".")[0])
    return int(numbers[-1]) if numbers else number


def _trace(rank: int, path: Path, events: Sequence[dict[str, Any]]) -> TraceFile:
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    numbered = _steps_of(complete, "cpu")
    # Kernels run later than the host starts them: the annotations of the GPU enclose them.
    on_device = _steps_of(complete, "gpu")
    work = [event for event in complete if event.get("cat") in _KERNELS]
    if not work:
        work = _outermost([event for event in complete if event.get("cat") == "cpu_op"])
        # Gloo's threads do the transfers; the operator that starts one ends before it.
        work += [event for event in complete if str(event.get("name", "")).startswith("gloo:")]
    if not work:
        return TraceFile(rank, path=path, note=f"{path.name} has neither kernels nor operators")
    if not numbered:
        spans = [_interval(event) for event in work]
        numbered = [(0, min(begin for begin, _ in spans), max(end for _, end in spans))]
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
    times = [_step_times((begin, end), unions) for _, begin, end in numbered]
    mean = {name: sum(step[name] for step in times) / len(times) for name in times[0]}
    known = (collective_of(event, *_interval(event)) for event in work)
    collectives = with_steps([item for item in known if item is not None], on_device or numbered)
    return TraceFile(rank, RankTimes(rank=rank, stage=0, **mean), kernels, collectives, path)


def _steps_of(events: Iterable[dict[str, Any]], device: str) -> list[tuple[int, float, float]]:
    """Return number, begin and end of the steps that the profiler's schedule has marked.

    The same annotations are on the timelines of the host and of the kernels (``"gpu"``).
    """
    steps = []
    for event in events:
        match = _STEP.fullmatch(str(event.get("name", "")))
        if match and str(event.get("cat", "")).startswith("gpu") == (device == "gpu"):
            steps.append((int(match[1]), *_interval(event)))
    return steps


def _step_times(step: Interval, unions: dict[str, list[Interval]]) -> dict[str, float]:
    inside = {kind: clipped(spans, step) for kind, spans in unions.items()}
    compute, communication = inside["compute"], inside["communication"]
    exposed = minus(communication, compute)
    waiting = minus(inside["pair"], compute)
    preparing = minus(inside["data"], union([*compute, *communication]))
    busy = length(union([*compute, *communication])) + length(preparing)
    return {
        "step": step[1] - step[0],
        "computing": length(compute),
        "communication": length(communication),
        "not_overlapped": length(exposed),
        "bubble": length(waiting),
        "preparing": length(preparing),
        "free": max(0.0, step[1] - step[0] - busy),
    }


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
    """Return the same time as intervals that do not touch, in order."""
    result: list[Interval] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def minus(spans: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time of disjoint intervals that none of the others covers; both in order."""
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


def merged(traces: Sequence[TraceFile], offsets: Mapping[int, float]) -> dict[str, Any]:
    """Return the traces of several ranks as one in Chrome's format, by the first rank's clock.

    Args:
        traces: whose files are read again; those that could not be read are left out.
        offsets: seconds by which the clock of each rank is ahead; of others 0.
    """
    events: list[dict[str, Any]] = []

    def name(rank: int, key: str, value: dict[str, Any], track: int = 0) -> None:
        events.append({"ph": "M", "pid": rank, "tid": track, "name": key, "args": value})

    for trace_file in traces:
        if trace_file.times is None:
            continue
        rank = trace_file.rank
        ahead = 1e6 * offsets.get(rank, 0.0)
        record = load(trace_file.path)
        source = record["traceEvents"] if isinstance(record, dict) else record
        tracks: dict[tuple[Any, Any], int] = {}
        name(rank, "process_name", {"name": f"rank {rank}"})
        name(rank, "process_sort_index", {"sort_index": rank})
        for event in source:
            if event.get("ph") != "X" or "dur" not in event:
                continue
            # A process of the trace, such as a GPU, becomes some tracks of the rank.
            place = event.get("pid"), event.get("tid")
            if place not in tracks:
                tracks[place] = len(tracks)
                name(rank, "thread_name", {"name": " ".join(map(str, place))}, tracks[place])
            moved = {"pid": rank, "tid": tracks[place], "ts": round(float(event["ts"]) - ahead, 3)}
            events.append(event | moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
