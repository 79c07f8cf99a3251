"""The one timer: warm-up, variants interleaved round by round, medians, contended samples out.

A round takes one sample of each variant, in a new random order, so that a drifting clock or a
neighbour on the machine affects all of them alike; two variants are compared by the ratio of the
samples of one round, and the median of those ratios. A CPU sample counts as contended when the
threads of this process waited for a core (``/proc/self/task/*/schedstat``): with two threads and
one foreign busy process an OpenMP barrier makes 0.4 ms into 12 ms (measured on two Zen 5 cores),
and then even the median says nothing about the kernel. Samples above three times the median are
dropped too. The result includes the number of dropped samples.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

# A sample whose threads waited longer than this share of its time is contended.
WAIT_SHARE = 0.05
OUTLIER = 3.0
# Short calls are repeated within a sample until it is this long: the clock and the reading of
# the scheduler's counters then cost below a thousandth.
SHORTEST_SAMPLE = 200e-6
LONGEST_REPEAT = 1000
# A call that takes so long when it is warm will not turn out to be a short one.
LONG_SAMPLE = 100 * SHORTEST_SAMPLE


@dataclass(frozen=True)
class Variant:
    """One of the things to compare."""

    name: str  # its key in the result
    run: Callable[[Any], Any]  # what is timed; it receives what ``prepare`` returned
    # makes the input of one ``run``, outside of the timed region
    prepare: Callable[[], Any] = lambda: None
    # entered around each sample, outside of the timed region
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some numbers, and how many there were."""

    median: float
    q1: float
    q3: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return Spread(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, q1, q3, len(values))

    @property
    def iqr_share(self) -> float:
        return (self.q3 - self.q1) / self.median if self.median else 0.0


@dataclass(frozen=True)
class TimingPlan:
    """How long to measure."""

    least: int = 7  # rounds that are always taken
    most: int = 50  # clean rounds after which it is enough
    # time after which it is enough, once ``least`` rounds are clean; when they are not, three times
    # as long
    seconds: float = 1.5


@dataclass
class Timing:
    """The samples of all variants, round by round, in seconds per call."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    contended: dict[str, list[bool]] = field(default_factory=dict)
    least: int = 1

    def kept(self, name: str) -> list[bool]:
        """Return which samples of a variant count.

        When none is clean, all but the outliers count; ``trusted`` says so.
        """
        clean = [not bad for bad in self.contended[name]]
        if not any(clean):
            clean = [True] * len(clean)
        values = self.rounds[name]
        limit = OUTLIER * statistics.median(
            value for value, good in zip(values, clean, strict=True) if good
        )
        return [good and value <= limit for value, good in zip(values, clean, strict=True)]

    def trusted(self, name: str) -> bool:
        return sum(not bad for bad in self.contended[name]) >= self.least

    def samples(self, name: str) -> list[float]:
        pairs = zip(self.rounds[name], self.kept(name), strict=True)
        return [value for value, good in pairs if good]

    def best(self, name: str) -> float:
        """Return the shortest sample: for limits and overheads, which only have a least value."""
        return min(self.samples(name))

    def discarded(self, name: str) -> int:
        return len(self.rounds[name]) - len(self.samples(name))

    def spread(self, name: str) -> Spread:
        return Spread.of(self.samples(name))

    def ratio(self, base: str, other: str) -> Spread:
        """Return how many times faster ``other`` is than ``base``: ratios of the same rounds.

        When just one of them has no clean sample, a waiting and a quiet run would be divided: then
        it is the ratio of the shortest samples. ``trusted`` is false for the one without.
        """
        if all(self.contended[base]) != all(self.contended[other]):
            return Spread.of([min(self.rounds[base]) / min(self.rounds[other])])
        columns = (self.rounds[base], self.kept(base), self.rounds[other], self.kept(other))
        ratios = [a / b for a, good_a, b, good_b in zip(*columns, strict=True) if good_a and good_b]
        return Spread.of(ratios or [self.best(base) / self.best(other)])


class Clock(Protocol):
    """Takes one sample: seconds per call, and whether something else disturbed it."""

    def sample(self, variant: Variant, repeat: int) -> tuple[float, bool]: ...

    def repeat(self, variant: Variant) -> int:
        """Warm up; return how often to run within a sample."""
        ...


class CpuClock:
    """Wall time on the CPU; contention by the scheduler's own count of waiting."""

    def sample(self, variant: Variant, repeat: int) -> tuple[float, bool]:
        run = variant.run
        with variant.context():
            inputs = [variant.prepare() for _ in range(repeat)]
            waited = _waiting()
            start = time.perf_counter()
            for value in inputs:
                run(value)
            elapsed = time.perf_counter() - start
            waited = _waiting() - waited
        return elapsed / repeat, waited > WAIT_SHARE * elapsed

    def repeat(self, variant: Variant) -> int:
        self.sample(variant, 1)
        fastest = float("inf")
        for _ in range(3):
            fastest = min(fastest, self.sample(variant, 1)[0])
            if fastest >= LONG_SAMPLE:
                return 1
        if fastest >= SHORTEST_SAMPLE:
            return 1
        return min(LONGEST_REPEAT, int(SHORTEST_SAMPLE / max(fastest, 1e-7)) + 1)


class CudaClock:
    """Time on the GPU by events, with a cold L2 cache and a full launch queue.

    Before each sample a buffer of twice the L2 is written (hot L2 flatters), and the GPU is kept
    busy for about the host time of one run: otherwise a kernel below about 100 us is timed
    together with the launches that it waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        size = max(2 * int(properties.L2_cache_size), 64 << 20)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        self._host_seconds: dict[str, float] = {}
        self._cycles_per_second = self._sleep_rate()

    def sample(self, variant: Variant, repeat: int) -> tuple[float, bool]:
        assert repeat == 1, "the second run of a sample would meet a hot L2"
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with variant.context():
            value = variant.prepare()
            self._flush.zero_()
            ahead = 1.5 * self._host_seconds.get(variant.name, 0.0) + 20e-6
            torch.cuda._sleep(int(ahead * self._cycles_per_second))
            begin.record()
            variant.run(value)
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3, False

    def repeat(self, variant: Variant) -> int:
        """Warm up and learn how long the host needs to launch one run; return 1."""
        hosts = []
        for _ in range(6):
            with variant.context():
                value = variant.prepare()
                torch.cuda.synchronize(self.device)
                start = time.perf_counter()
                variant.run(value)
                hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        self._host_seconds[variant.name] = statistics.median(hosts[1:])
        return 1

    def _sleep_rate(self) -> float:
        cycles = 10_000_000
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e-3)


class BriefClock:
    """A clock that warms up once: the usual four runs may be most of what there is time for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def sample(self, variant: Variant, repeat: int) -> tuple[float, bool]:
        return self.clock.sample(variant, repeat)

    def repeat(self, variant: Variant) -> int:
        if isinstance(self.clock, CudaClock):
            return self.clock.repeat(variant)
        seconds, _ = self.clock.sample(variant, 1)
        return min(LONGEST_REPEAT, int(SHORTEST_SAMPLE / max(seconds, 1e-7)) + 1)


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def measure(variants: Sequence[Variant], clock: Clock, plan: TimingPlan) -> Timing:
    """Time the variants, whose names are unique, against each other; return all samples."""
    repeats = {variant.name: clock.repeat(variant) for variant in variants}
    timing = Timing({name: [] for name in repeats}, {name: [] for name in repeats}, plan.least)
    order = list(variants)
    shuffle = random.Random(0).shuffle
    start = time.perf_counter()
    rounds = 0
    while True:
        shuffle(order)
        for variant in order:
            seconds, contended = clock.sample(variant, repeats[variant.name])
            timing.rounds[variant.name].append(seconds)
            timing.contended[variant.name].append(contended)
        rounds += 1
        clean = min((bad.count(False) for bad in timing.contended.values()), default=rounds)
        elapsed = time.perf_counter() - start
        enough = plan.seconds if clean >= plan.least else 3 * plan.seconds
        if clean >= plan.most or (rounds >= plan.least and elapsed > enough):
            return timing


def _waiting() -> float:
    """Return how many seconds the threads of this process have waited for a core so far."""
    total = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
        return total * 1e-9
    except (OSError, IndexError, ValueError):
        # Not Linux, or no scheduler statistics: an involuntary switch costs about a time slice.
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw * 4e-3
