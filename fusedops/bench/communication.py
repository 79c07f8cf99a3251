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
    """A collective of one size.

    Attributes:
        collective: of ``COLLECTIVES``.
        backend: of ``BACKENDS``.
        ranks: how many communicate.
        nodes: on how many hosts.
        bytes: of a rank's tensor; of all ranks' together where a collective gathers or scatters.
        iterations: how many were timed.
        min_us: microseconds of the fastest rank, each the median of ``_BATCHES`` batches.
        avg_us: the mean of the ranks.
        max_us: of the slowest rank.
        algbw: ``bytes`` by ``avg_us``, bytes/s.
        busbw: that times the collective's factor.
        wrong: elements that arrived with another value, on all ranks together.
    """

    collective: str
    backend: str
    ranks: int
    nodes: int
    bytes: int
    iterations: int
    min_us: float
    avg_us: float
    max_us: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(frozen=True)
class LinkRow:
    """What two ranks reach who send to each other while all other pairs do.

    Attributes:
        first: a rank.
        second: the other.
        hosts: their hosts.
        bandwidth: bytes/s in one direction.
        slow: whether that is below ``SLOW`` of the median of pairs of its kind (on one host, or
            on two).
    """

    first: int
    second: int
    hosts: tuple[str, str]
    bandwidth: float
    slow: bool


class _Case:
    """A collective of one size on a group: what is called, and what must arrive."""

    factor = staticmethod(lambda ranks: (ranks - 1) / ranks)

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.device = device
        self.elements = self._elements(max(1, size // _ITEM))
        self.tensor = torch.zeros(self._own(), device=device)

    def _elements(self, asked: int) -> int:
        """Return the number of elements nearest to those asked for, from one per rank on."""
        return max(1, asked // self.ranks) * self.ranks

    def _own(self) -> int:
        """Return how many elements this rank gives."""
        return self.elements

    @property
    def bytes(self) -> int:
        return self.elements * _ITEM

    def call(self) -> torch.Tensor:
        """Communicate."""
        raise NotImplementedError

    def expected(self) -> torch.Tensor:
        """Return what must arrive where rank ``r`` gives ``pattern(r)``."""
        raise NotImplementedError

    def pattern(self, rank: int, count: int) -> torch.Tensor:
        """Return small integers that differ by rank and place."""
        places = torch.arange(count, device=self.device)
        return ((places * 7 + rank * 13) % 31).float()

    def wrong(self) -> int:
        """Communicate patterns; returns how many elements are not what they must be."""
        self.tensor.copy_(self.pattern(self.rank, self.tensor.numel()))
        arrived = self.call()
        wrong = int((arrived != self.expected()).sum())
        self.tensor.zero_()
        return wrong


class _AllReduce(_Case):
    factor = staticmethod(lambda ranks: 2 * (ranks - 1) / ranks)

    def call(self) -> torch.Tensor:
        return collectives.all_reduce(self.tensor, self.group).wait()

    def expected(self) -> torch.Tensor:
        patterns = [self.pattern(rank, self.elements) for rank in range(self.ranks)]
        return torch.stack(patterns).sum(0)


class _ReduceScatter(_Case):
    def call(self) -> torch.Tensor:
        return collectives.reduce_scatter(self.tensor, self.group).wait()

    def expected(self) -> torch.Tensor:
        patterns = [self.pattern(rank, self.elements) for rank in range(self.ranks)]
        return torch.stack(patterns).sum(0).chunk(self.ranks)[self.rank]


class _AllGather(_Case):
    def _own(self) -> int:
        return self.elements // self.ranks

    def call(self) -> torch.Tensor:
        return collectives.all_gather(self.tensor, self.group).wait()

    def expected(self) -> torch.Tensor:
        return torch.cat([self.pattern(rank, self._own()) for rank in range(self.ranks)])


class _Broadcast(_Case):
    factor = staticmethod(lambda ranks: 1.0)

    def call(self) -> torch.Tensor:
        return collectives.broadcast(self.tensor, self.group).wait()

    def expected(self) -> torch.Tensor:
        return self.pattern(0, self.elements)


class _SendReceive(_Case):
    """Each rank sends to the next one and receives from the one before."""

    factor = staticmethod(lambda ranks: 1.0)

    def call(self) -> torch.Tensor:
        return collectives.shift(self.tensor, self.group, by=1).wait()

    def expected(self) -> torch.Tensor:
        return self.pattern((self.rank - 1) % self.ranks, self.elements)


class _AllToAll(_Case):
    def call(self) -> torch.Tensor:
        return collectives.all_to_all(self.tensor, self.group).wait()

    def counts(self, source: int) -> list[int]:
        """Return how many elements a rank sends to each."""
        return [self.elements // self.ranks] * self.ranks

    def expected(self) -> torch.Tensor:
        parts = []
        for source in range(self.ranks):
            sent = self.counts(source)
            pattern = self.pattern(source, sum(sent))
            parts.append(pattern.split(sent)[self.rank])
        return torch.cat(parts)


class _AllToAllUneven(_AllToAll):
    """As an all-to-all of experts: to some ranks three times as much as to others."""

    def _elements(self, asked: int) -> int:
        self.unit = max(1, asked // (2 * self.ranks))
        return max(sum(self.counts(rank)) for rank in range(self.ranks))

    def _own(self) -> int:
        return sum(self.counts(self.rank))

    def counts(self, source: int) -> list[int]:
        return [self.unit * (1 + (source + 2 * rank) % 3) for rank in range(self.ranks)]

    def call(self) -> torch.Tensor:
        receive = [self.counts(source)[self.rank] for source in range(self.ranks)]
        send = self.counts(self.rank)
        return collectives.all_to_all(self.tensor, self.group, send=send, receive=receive).wait()


COLLECTIVES: dict[str, type[_Case]] = {
    "all_reduce": _AllReduce,
    "reduce_scatter": _ReduceScatter,
    "all_gather": _AllGather,
    "broadcast": _Broadcast,
    "all_to_all": _AllToAll,
    "all_to_all_uneven": _AllToAllUneven,
    "send_receive": _SendReceive,
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
    """Measure collectives.

    Args:
        ranks: those that communicate.
        backends: of ``BACKENDS``.
        names: of ``COLLECTIVES``.
        bytes_of: sizes.
        seconds: for each row, about.
        report: is called with what was measured.

    Returns:
        A row by backend, collective and size, in this order.

    Raises:
        RuntimeError: the ranks do not have a backend.
    """
    nodes = len(set(ranks.gathered(socket.gethostname())))
    rows = []
    for backend in backends:
        with _group(backend, ranks) as group:
            for name in names:
                for size in bytes_of:
                    case = COLLECTIVES[name](group, size, ranks.device)
                    rows.append(_row(case, name, backend, nodes, ranks, seconds))
                report(f"{backend}, {name}")
    return rows


def _row(
    case: _Case, name: str, backend: str, nodes: int, ranks: Ranks, seconds: float
) -> CommunicationRow:
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
        collective=name,
        backend=backend,
        ranks=case.ranks,
        nodes=nodes,
        bytes=case.bytes,
        iterations=iterations * _BATCHES,
        min_us=min(times),
        avg_us=mean,
        max_us=max(times),
        algbw=rate,
        busbw=rate * case.factor(case.ranks),
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
    """Measure each pair of ranks, in rounds in which all communicate.

    ``n - 1`` rounds of ``n`` ranks, ``n`` of an odd number: a pair of each round sends ``size``
    bytes to each other.

    Args:
        ranks: those that communicate.
        backend: of ``BACKENDS``.
        size: bytes.
        repeats: exchanges of a pair; the fastest counts.

    Returns:
        The pairs, the slowest first.
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
    """Return rounds of pairs in which each two ranks meet once (a tournament's circle).

    Example:
        >>> rounds(4)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places: list[int | None] = list(range(ranks))
    if ranks % 2:
        places.append(None)
    half = len(places) // 2
    result = []
    for _ in range(len(places) - 1):
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        pairs = [
            (min(first, second), max(first, second))
            for first, second in facing
            if first is not None and second is not None
        ]
        result.append(sorted(pairs))
        places = [places[0], places[-1], *places[1:-1]]
    return result


def mark_slow(pairs: Sequence[tuple[int, int, float]], hosts: Sequence[str]) -> list[LinkRow]:
    """Return pairs of ranks and their bytes/s as rows, the slowest first."""
    kinds: dict[bool, list[float]] = {}
    for first, second, bandwidth in pairs:
        kinds.setdefault(hosts[first] == hosts[second], []).append(bandwidth)
    usual = {kind: statistics.median(values) for kind, values in kinds.items()}
    rows = [
        LinkRow(
            first,
            second,
            (hosts[first], hosts[second]),
            bandwidth,
            bandwidth < SLOW * usual[hosts[first] == hosts[second]],
        )
        for first, second, bandwidth in pairs
    ]
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
