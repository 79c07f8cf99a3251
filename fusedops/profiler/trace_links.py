"""What traces of several ranks show together: links between ranks, and clocks that differ.

All ranks of a process group leave a collective at about the same moment. The rank that arrives
last is in it for as long as the transfer takes, and the others for longer. So the shortest time of
a collective is that of its transfer, and its ends tell how far the clocks of two ranks differ.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusedops.profiler.step_table import GroupTimes

_BYTES = {"float": 4, "float32": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "int": 4}
# Collectives of a trace that are kept: those of its first steps.
_MOST = 600
_WORDS = ("allreduce", "reducescatter", "allgather", "alltoall", "broadcast", "send", "recv")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, or a transfer between two ranks, of one rank.

    Attributes:
        group: name and ranks of its process group.
        kind: what the process group is for, by its description: ``"tp"``, or ``"default_pg"``.
        name: one of ``allreduce``, ``allgather`` and so on.
        begin: seconds by the clock of the rank.
        end: seconds.
        bytes: that the rank sends; 0: unknown.
        ranks: of the group; empty: unknown.
        step: number of the step in which it begins; -1: outside of all steps.
    """

    group: str
    kind: str
    name: str
    begin: float
    end: float
    bytes: float
    ranks: tuple[int, ...] = ()
    step: int = -1

    @property
    def synchronizes(self) -> bool:
        """Whether all ranks leave it at the same moment."""
        return self.name in ("allreduce", "reducescatter", "allgather", "alltoall")


def collective_of(event: Mapping[str, Any], begin: float, end: float) -> Collective | None:
    """Return the collective that an event of a trace is; ``None``: its arguments do not say.

    Args:
        event: of a kernel or an operator, with ``torch.profiler``'s arguments of collectives.
        begin: seconds.
        end: seconds.
    """
    arguments = event.get("args")
    if not isinstance(arguments, dict) or "Collective name" not in arguments:
        return None
    words = re.sub("[^a-z]", "", str(arguments["Collective name"]).lower())
    name = next((word for word in _WORDS if word in words), words)
    listed = str(arguments.get("Process Group Ranks", ""))
    ranks = tuple(int(number) for number in re.findall(r"\d+", listed))
    size = int(arguments.get("Group size") or len(ranks))
    if len(ranks) != size:  # long lists are cut: [0, 1, ..., 1023]
        ranks = ()
    item = _BYTES.get(str(arguments.get("dtype", "")).lower(), 1)
    inside = item * int(arguments.get("In msg nelems") or 0)
    outside = item * int(arguments.get("Out msg nelems") or 0)
    share = (size - 1) / size if size else 0.0
    sent = {
        "allreduce": 2 * share * inside,
        "allgather": share * outside,
        "reducescatter": share * inside,
        "alltoall": share * inside,
        "recv": 0.0,
    }.get(name, float(inside))
    kind = str(arguments.get("Process Group Description", "")).removeprefix("mesh_")
    return Collective(
        f"{arguments.get('Process Group Name', '')} {listed}",
        "world" if kind in ("", "default_pg", "undefined") else kind,
        name,
        begin,
        end,
        sent,
        ranks,
    )


Matched = list[dict[int, Collective]]


def matched(collectives: Mapping[int, Iterable[Collective]]) -> Matched:
    """Return each collective as its ranks saw it, by rank; those of fewer than two are left out.

    Those of a group are matched by step, name and number within the step, because traces need not
    begin at the same one.

    Args:
        collectives: of each rank, in the order of their begins.
    """
    table: dict[tuple[Any, ...], dict[int, Collective]] = defaultdict(dict)
    for rank, items in collectives.items():
        counts: dict[tuple[Any, ...], int] = defaultdict(int)
        for item in items:
            key = (item.group, item.step, item.name)
            table[(*key, counts[key])][rank] = item
            counts[key] += 1
    return [seen for seen in table.values() if len(seen) > 1]


def clock_offsets(together: Matched) -> dict[int, float]:
    """Return how many seconds the clock of each rank is ahead of that of the first one.

    A rank that shares no collective with the others, not even by way of a third one, is left out.
    """
    differences: dict[tuple[int, int], list[float]] = defaultdict(list)
    for seen in together:
        if not next(iter(seen.values())).synchronizes:
            continue
        first, *others = sorted(seen)
        for other in others:
            differences[first, other].append(seen[other].end - seen[first].end)
    neighbours: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (one, other), values in differences.items():
        offset = statistics.median(values)
        neighbours[one].append((other, offset))
        neighbours[other].append((one, -offset))
    if not neighbours:
        return {}
    start = min(neighbours)
    offsets, waiting = {start: 0.0}, [start]
    while waiting:
        rank = waiting.pop()
        for other, offset in neighbours[rank]:
            if other not in offsets:
                offsets[other] = offsets[rank] + offset
                waiting.append(other)
    return offsets


def link_times(together: Matched) -> list[GroupTimes]:
    """Return the transfers of each process group in a step."""
    bytes_of: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    seconds_of: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for seen in together:
        items = list(seen.values())
        key = items[0].kind, items[0].ranks or tuple(sorted(seen))
        bytes_of[key] += max(item.bytes for item in items)
        seconds_of[key] += min(item.end - item.begin for item in items)
    steps = _steps(together)
    return [
        GroupTimes(kind, ranks, bytes_of[kind, ranks] / steps, seconds / steps)
        for (kind, ranks), seconds in sorted(seconds_of.items())
    ]


def _steps(together: Matched) -> int:
    return max(1, len({item.step for seen in together for item in seen.values()}))


def late_seconds(together: Matched, offsets: Mapping[int, float]) -> dict[int, float]:
    """Return for how long others wait for each rank in a step.

    In each collective the last rank to arrive makes the others wait, since the one before it came.

    Args:
        together: of ``matched``.
        offsets: of ``clock_offsets``.
    """
    seconds: dict[int, float] = defaultdict(float)
    for seen in together:
        known = [rank for rank in seen if rank in offsets]
        if len(known) < 2 or not seen[known[0]].synchronizes:
            continue
        arrivals = sorted((seen[rank].begin - offsets[rank], rank) for rank in known)
        (before, _), (last, rank) = arrivals[-2:]
        seconds[rank] += last - before
    steps = _steps(together)
    return {rank: total / steps for rank, total in seconds.items()}


def with_steps(
    items: Iterable[Collective], steps: Sequence[tuple[int, float, float]]
) -> list[Collective]:
    """Return the collectives of the first steps, by their begins, with the numbers of the steps.

    Args:
        items: in any order.
        steps: number, begin and end of each step.
    """
    ordered = sorted(items, key=lambda item: item.begin)
    result: list[Collective] = []
    for number, begin, end in sorted(steps, key=lambda step: step[1]):
        inside = [replace(item, step=number) for item in ordered if begin <= item.begin < end]
        if result and len(result) + len(inside) > _MOST:
            break
        result += inside
    return result
