"""Collectives of the stack, timed by size: ``fusedops bench communication``.

The conventions are those of nccl-tests: sizes are powers of two, the algorithm bandwidth is size by
time, and the bus bandwidth is that times a factor of the collective, by which it can be compared
with the bandwidth of a link. What arrives is checked before it is timed. All functions run on every
rank and return the same everywhere.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import env
from fusedops.launch.processes import Ranks
from fusedops.parallel.comm import collectives
from fusedops.runtime import shared_memory

BACKENDS = ("gloo", "shared_memory", "nccl")
_ITEM = 4  # bytes of float32
_WARM_UP = 3
_BATCHES = 5
_MOST_ITERATIONS = 1000
# A link is slow below this share of the median of links of its kind.
SLOW = 0.7


@dataclass(frozen=True)
class CommunicationRow:
    """A collective of one size."""

    collective: str  # of ``COLLECTIVES``
    backend: str  # of ``BACKENDS``
    ranks: int  # how many communicate
    nodes: int  # on how many hosts
    bytes: int  # of a rank's tensor; of all ranks' where a collective gathers or scatters
    iterations: int  # how many were timed
    min_us: float  # microseconds of the fastest rank, each the median of ``_BATCHES`` batches
    avg_us: float  # the mean of the ranks
    max_us: float  # of the slowest rank
    algbw: float  # ``bytes`` by ``avg_us``, bytes/s
    busbw: float  # that times the collective's factor
    wrong: int  # elements that arrived with another value, on all ranks together


@dataclass(frozen=True)
class LinkRow:
    """What two ranks reach who send to each other while all other pairs do."""

    first: int  # a rank
    second: int  # the other
    hosts: tuple[str, str]  # of both
    bandwidth: float  # bytes/s in one direction
    slow: bool  # below ``SLOW`` of the median of pairs of its kind (on one host, or on two)


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class _Collective:
    """One that is measured."""

    call: Callable[[_Case], collectives.Pending]  # communicates the tensor of a case
    # what must then arrive, where ranks gave these tensors
    expected: Callable[[_Case, list[torch.Tensor]], torch.Tensor]
    factor: Callable[[int], float] = _all_but_own  # of the bus bandwidth, by the number of ranks
    gathers: bool = False  # whether a rank gives its share alone, and gets all
    uneven: bool = False  # some ranks get three times as much as others, as ranks with experts do


class _Case:
    """A collective of one size on a group."""

    def __init__(
        self, collective: _Collective, group: dist.ProcessGroup, size: int, device: torch.device
    ) -> None:
        self.collective, self.group, self.device = collective, group, device
        self.ranks, self.rank = group.size(), group.rank()
        every, asked = range(self.ranks), max(1, size // _ITEM)
        # Elements that each rank sends to each; every rank has one at least.
        self.counts = [[max(1, asked // self.ranks)] * self.ranks for _ in every]
        if collective.uneven:
            unit = max(1, asked // (2 * self.ranks))
            self.counts = [[unit * (1 + (rank + 2 * to) % 3) for to in every] for rank in every]
        self.bytes = max(map(sum, self.counts)) * _ITEM
        self.given = [sent[0] if collective.gathers else sum(sent) for sent in self.counts]
        self.tensor = torch.zeros(self.given[self.rank], device=device)

    def call(self) -> torch.Tensor:
        """Communicate."""
        return self.collective.call(self).wait()

    def wrong(self) -> int:
        """Communicate small integers that differ by rank and place; count those that are wrong."""
        patterns = [
            ((torch.arange(count, device=self.device) * 7 + rank * 13) % 31).float()
            for rank, count in enumerate(self.given)
        ]
        self.tensor.copy_(patterns[self.rank])
        wrong = int((self.call() != self.collective.expected(self, patterns)).sum())
        self.tensor.zero_()
        return wrong


def _all_to_all(case: _Case) -> collectives.Pending:
    if not case.collective.uneven:
        return collectives.all_to_all(case.tensor, case.group)
    send, receive = case.counts[case.rank], [sent[case.rank] for sent in case.counts]
    return collectives.all_to_all(case.tensor, case.group, send=send, receive=receive)


def _sum(_: _Case, given: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(given).sum(0)


def _sent(case: _Case, given: list[torch.Tensor]) -> torch.Tensor:
    """Return the part of each rank's tensor that is for this one."""
    pairs = zip(given, case.counts, strict=True)
    return torch.cat([tensor.split(sent)[case.rank] for tensor, sent in pairs])


COLLECTIVES: dict[str, _Collective] = {
    "all_reduce": _Collective(
        lambda case: collectives.all_reduce(case.tensor, case.group),
        _sum,
        factor=lambda ranks: 2 * _all_but_own(ranks),
    ),
    "reduce_scatter": _Collective(
        lambda case: collectives.reduce_scatter(case.tensor, case.group),
        lambda case, given: _sum(case, given).chunk(case.ranks)[case.rank],
    ),
    "all_gather": _Collective(
        lambda case: collectives.all_gather(case.tensor, case.group),
        lambda case, given: torch.cat(given),
        gathers=True,
    ),
    "broadcast": _Collective(
        lambda case: collectives.broadcast(case.tensor, case.group),
        lambda case, given: given[0],
        factor=lambda ranks: 1.0,
    ),
    "all_to_all": _Collective(_all_to_all, _sent),
    "all_to_all_uneven": _Collective(_all_to_all, _sent, uneven=True),
    "send_receive": _Collective(  # each sends to the next one and receives from the one before
        lambda case: collectives.shift(case.tensor, case.group, by=1),
        lambda case, given: given[case.rank - 1],
        factor=lambda ranks: 1.0,
    ),
}


def sizes(least: int, most: int) -> list[int]:
    """Return the powers of two from ``least`` to ``most`` bytes."""
    return [1 << power for power in range(64) if least <= 1 << power <= most]


def usual_backends(ranks: Ranks) -> list[str]:
    """Return the backends that these ranks have."""
    if ranks.device.type == "cuda":
        return ["nccl"]
    return [backend for backend in ("gloo", "shared_memory") if _serves(backend, ranks)]


def measure(
    ranks: Ranks,
    backends: Sequence[str],
    names: Sequence[str],
    bytes_of: Sequence[int],
    seconds: float,
    report: Callable[[str], None],
) -> list[CommunicationRow]:
    """Measure collectives, for about so many seconds a row; ``report`` is called with what was.

    Returns:
        A row by backend of ``BACKENDS``, collective of ``COLLECTIVES`` and size, in this order.

    Raises:
        RuntimeError: the ranks do not have a backend.
    """
    nodes = len(set(ranks.gathered(socket.gethostname())))
    rows = []
    for backend in backends:
        with _group(backend, ranks) as group:
            for name in names:
                place = {"collective": name, "backend": backend, "nodes": nodes}
                for size in bytes_of:
                    case = _Case(COLLECTIVES[name], group, size, ranks.device)
                    rows.append(_row(case, ranks, seconds, place))
                report(f"{backend}, {name}")
    return rows


def _row(case: _Case, ranks: Ranks, seconds: float, place: dict[str, Any]) -> CommunicationRow:
    """Check a collective, then time it; ``place`` has further fields of the row."""
    wrong = case.wrong()
    for _ in range(_WARM_UP):
        case.call()
    once = max(ranks.gathered(_seconds(case, 1, ranks.device)))
    iterations = max(1, min(_MOST_ITERATIONS, round(seconds / _BATCHES / max(once, 1e-7))))
    batches = []
    for _ in range(_BATCHES):
        # Ranks that begin together: no rank's time holds the wait for another's begin.
        dist.barrier()
        batches.append(_seconds(case, iterations, ranks.device))
    times = [1e6 * value for value in ranks.gathered(statistics.median(batches))]
    mean = statistics.fmean(times)
    rate = case.bytes / mean * 1e6
    return CommunicationRow(
        **place,
        ranks=case.ranks,
        bytes=case.bytes,
        iterations=iterations * _BATCHES,
        min_us=min(times),
        avg_us=mean,
        max_us=max(times),
        algbw=rate,
        busbw=rate * case.collective.factor(case.ranks),
        wrong=sum(ranks.gathered(wrong)),
    )


def _seconds(case: _Case, iterations: int, device: torch.device) -> float:
    """Return the seconds of one of several calls."""
    begin = time.perf_counter()
    for _ in range(iterations):
        case.call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / iterations


def links(ranks: Ranks, backend: str, size: int, repeats: int = 5) -> list[LinkRow]:
    """Measure each pair of ranks, in rounds in which all communicate; return the slowest first.

    ``n - 1`` rounds of ``n`` ranks, ``n`` of an odd number: a pair of each round sends ``size``
    bytes to each other, ``repeats`` times, of which the fastest counts.
    """
    hosts = ranks.gathered(socket.gethostname())
    best: list[tuple[int, int, float]] = []
    with _group(backend, ranks) as group:
        tensor = torch.zeros(max(1, size // _ITEM), device=ranks.device)
        arrived = torch.empty_like(tensor)
        for pairs in rounds(ranks.size):
            mine = next((pair for pair in pairs if ranks.rank in pair), None)
            least = float("inf")
            dist.barrier()
            for _ in range(repeats if mine else 0):
                assert mine is not None
                other = sum(mine) - ranks.rank
                begin = time.perf_counter()
                collectives.send_receive(tensor, group, to=other, source=other, out=arrived).wait()
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize(ranks.device)
                least = min(least, time.perf_counter() - begin)
            times = ranks.gathered(least)
            best += [(a, b, max(times[a], times[b])) for a, b in pairs]
    return mark_slow([(a, b, tensor.numel() * _ITEM / took) for a, b, took in best], hosts)


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each two ranks meet once (a tournament's circle)."""
    places = list(range(ranks + ranks % 2))  # of an odd number the last one pauses
    half = len(places) // 2
    result = []
    for _ in range(len(places) - 1):
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        pairs = [(min(pair), max(pair)) for pair in facing if max(pair) < ranks]
        result.append(sorted(pairs))
        places = [places[0], places[-1], *places[1:-1]]
    return result


def mark_slow(pairs: Sequence[tuple[int, int, float]], hosts: Sequence[str]) -> list[LinkRow]:
    """Return pairs of ranks and their bytes/s as rows, the slowest first."""
    kinds: dict[bool, list[float]] = {}
    for first, second, bandwidth in pairs:
        kinds.setdefault(hosts[first] == hosts[second], []).append(bandwidth)
    usual = {kind: statistics.median(values) for kind, values in kinds.items()}
    rows = []
    for first, second, bandwidth in pairs:
        ends = hosts[first], hosts[second]
        slow = bandwidth < SLOW * usual[ends[0] == ends[1]]
        rows.append(LinkRow(first, second, ends, bandwidth, slow))
    return sorted(rows, key=lambda row: row.bandwidth)


@contextmanager
def _group(backend: str, ranks: Ranks) -> Iterator[dist.ProcessGroup]:
    """Make a group of all ranks that communicates by a backend.

    Raises:
        RuntimeError: the ranks do not have it.
    """
    with env.shared_memory_set(backend == "shared_memory"):
        group = dist.new_group(backend="nccl" if backend == "nccl" else "gloo")
        calls = shared_memory.count()
        # The ranks agree on shared memory at their first collective.
        collectives.all_reduce(torch.zeros(1, device=ranks.device), group).wait()
        if backend == "shared_memory" and shared_memory.count() == calls:
            raise RuntimeError(
                "these ranks share no memory: they are on several hosts or GPUs, or the compiled "
                "library is missing (fusedops doctor)"
            )
        yield group


def _serves(backend: str, ranks: Ranks) -> bool:
    try:
        with _group(backend, ranks):
            return True
    except RuntimeError:
        return False
