"""Writes traces that Perfetto and Chrome open: recorded steps, or the traces of several ranks.

Of recorded steps only sums are known: sections are drawn in their usual order, waits after the
backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusedops.profiler.timings import GROUPS, Timings
from fusedops.profiler.traces import TraceFile, load

_ORDER = ("data", "forward", "backward", *(f"blocked_{name}" for name in GROUPS), "optimizer")
_AFTER = ("other", "validation", "checkpoint")


def trace(timings: Timings) -> dict[str, Any]:
    """Return the trace in Chrome's format; times are microseconds."""
    events: list[dict[str, Any]] = []
    shape = timings.shape
    for rank in range(shape.ranks):
        host = f", {shape.hosts[rank]}" if shape.hosts else ""
        events += _process(rank, f"rank {rank}, stage {shape.stage_of(rank)}{host}")
    columns = {name: (1e6 * timings.of(name)).tolist() for name in (*_ORDER, *_AFTER, "step")}
    memory = timings.of("memory").tolist()
    begin = 0.0
    for number, step in enumerate(timings.steps):
        longest = max(columns["step"][number])
        for rank in range(shape.ranks):
            duration = columns["step"][number][rank]
            events.append(_slice(rank, f"step {step}", begin, duration))
            at = begin
            for name in (*_ORDER, *_AFTER):
                seconds = columns[name][number][rank]
                if seconds > 0:
                    events.append(_slice(rank, name.replace("blocked_", "waiting: "), at, seconds))
                    at += seconds
            used = {"bytes": memory[number][rank]}
            events.append({"ph": "C", "pid": rank, "name": "memory", "ts": begin, "args": used})
        begin += longest
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merged(traces: Sequence[TraceFile], offsets: Mapping[int, float]) -> dict[str, Any]:
    """Return the traces of several ranks as one, by the clock of the first rank.

    Args:
        traces: whose files are read again; those that could not be read are left out.
        offsets: seconds by which the clock of each rank is ahead; of others 0.
    """
    events: list[dict[str, Any]] = []
    for trace_file in traces:
        if trace_file.times is None:
            continue
        rank = trace_file.rank
        ahead = 1e6 * offsets.get(rank, 0.0)
        record = load(trace_file.path)
        source = record["traceEvents"] if isinstance(record, dict) else record
        tracks: dict[tuple[Any, Any], int] = {}
        events += _process(rank, f"rank {rank}")
        for event in source:
            if event.get("ph") != "X" or "dur" not in event:
                continue
            # A process of the trace, such as a GPU, becomes some tracks of the rank.
            place = event.get("pid"), event.get("tid")
            if place not in tracks:
                tracks[place] = len(tracks)
                track = {"name": " ".join(map(str, place))}
                events.append(
                    {"ph": "M", "pid": rank, "tid": tracks[place], "name": "thread_name"}
                    | {"args": track}
                )
            moved = {"pid": rank, "tid": tracks[place], "ts": round(float(event["ts"]) - ahead, 3)}
            events.append(event | moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(rank: int, name: str) -> list[dict[str, Any]]:
    values = {"process_name": {"name": name}, "process_sort_index": {"sort_index": rank}}
    return [{"ph": "M", "pid": rank, "name": key, "args": value} for key, value in values.items()]


def _slice(rank: int, name: str, begin: float, duration: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "name": name,
        "ts": round(begin, 3),
        "dur": round(duration, 3),
    }
