"""Writes recorded steps as a trace that Perfetto and Chrome open: a track for each rank.

Only sums of a step are recorded: sections are drawn in their usual order, waits after the backward.
"""

from __future__ import annotations

from typing import Any

from fusedops.profiler.timings import GROUPS, Timings

_ORDER = ("data", "forward", "backward", *(f"blocked_{name}" for name in GROUPS), "optimizer")
_AFTER = ("other", "validation", "checkpoint")


def trace(timings: Timings) -> dict[str, Any]:
    """Return the trace in Chrome's format; times are microseconds."""
    events: list[dict[str, Any]] = []
    shape = timings.shape
    for rank in range(shape.ranks):
        host = f", {shape.hosts[rank]}" if shape.hosts else ""
        for name, value in (
            ("process_name", {"name": f"rank {rank}, stage {shape.stage_of(rank)}{host}"}),
            ("process_sort_index", {"sort_index": rank}),
        ):
            events.append({"ph": "M", "pid": rank, "name": name, "args": value})
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


def _slice(rank: int, name: str, begin: float, duration: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "name": name,
        "ts": round(begin, 3),
        "dur": round(duration, 3),
    }
