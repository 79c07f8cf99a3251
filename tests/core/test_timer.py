"""The timer on functions and clocks whose times are known."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from fusedops.runtime import timer
from fusedops.runtime.timer import CpuClock, CudaClock, Spread, Timing, TimingPlan, Variant, measure


class ScriptedClock:
    """Gives each variant the times of a script, with marks of contention."""

    def __init__(self, scripts: dict[str, Iterator[tuple[float, bool]]]) -> None:
        self.scripts = scripts
        self.order: list[str] = []

    def sample(self, variant: Variant, repeat: int) -> tuple[float, bool]:
        self.order.append(variant.name)
        return next(self.scripts[variant.name])

    def repeat(self, variant: Variant) -> int:
        return 1


def steady(seconds: float) -> Iterator[tuple[float, bool]]:
    """Give one time for ever, undisturbed."""
    return itertools.repeat((seconds, False))


def variants(*names: str) -> list[Variant]:
    return [Variant(name, lambda _: None) for name in names]


def test_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    quiet = dict.fromkeys("ab", [False] * 3)
    timing = Timing({"a": [2.0, 8.0, 3.0], "b": [1.0, 2.0, 3.0]}, quiet)
    assert timing.ratio("a", "b") == Spread(2.0, 1.5, 3.0, 3)
    drift = Timing({"a": [3.0, 3.3, 3.6], "b": [1.0, 1.1, 1.2]}, timing.contended)
    assert drift.ratio("a", "b").median == pytest.approx(3.0)


def test_contended_samples_and_outliers_do_not_count() -> None:
    times = itertools.cycle([(1.0, False), (9.0, True), (1.2, False), (50.0, False), (1.1, False)])
    clock = ScriptedClock({"a": times, "b": steady(2.0)})
    timing = measure(variants("a", "b"), clock, TimingPlan(least=5, most=20, seconds=60))
    taken = len(timing.rounds["a"])
    assert set(timing.samples("a")) == {1.0, 1.1, 1.2}
    assert timing.discarded("a") == taken - len(timing.samples("a")) >= taken // 3
    assert timing.discarded("b") == 0
    assert timing.trusted("a")
    assert timing.ratio("b", "a").median == pytest.approx(2.0 / 1.1)


def test_only_contended_samples_are_reported_as_not_trusted() -> None:
    scripts = {"quiet": steady(1.0), "busy": itertools.cycle([(12.0, True), (4.0, True)])}
    plan = TimingPlan(least=3, most=8, seconds=0.001)
    timing = measure(variants(*scripts), ScriptedClock(scripts), plan)
    assert timing.trusted("quiet") and not timing.trusted("busy")
    # Not 12: the shortest sample is the nearest to an undisturbed one.
    assert timing.ratio("busy", "quiet").median == 4.0
    few = Timing({"a": [1.0] * 5}, {"a": [False, False, True, True, True]}, least=3)
    assert not few.trusted("a") and Timing(few.rounds, few.contended, least=2).trusted("a")
    # Two that are always disturbed are compared round by round.
    both = Timing({"a": [8.0, 4.0, 2.0], "b": [4.0, 2.0, 2.0]}, {"a": [True] * 3, "b": [True] * 3})
    assert both.ratio("a", "b").median == 2.0 and not both.trusted("a")


def test_order_changes_from_round_to_round() -> None:
    names = ("a", "b", "c")
    clock = ScriptedClock({name: steady(1.0) for name in names})
    measure(variants(*names), clock, TimingPlan(least=20, most=20, seconds=60))
    rounds = [tuple(clock.order[i : i + 3]) for i in range(0, len(clock.order), 3)]
    assert all(sorted(each) == list(names) for each in rounds)
    assert len(set(rounds)) > 3


class FakeTime:
    """A clock that only moves when told, and how long threads waited: no test hangs on a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.waited = 0.0
        monkeypatch.setattr(timer.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timer, "_waiting", lambda: self.waited)

    def takes(self, seconds: float, waiting: float = 0.0) -> Callable[..., None]:
        def run(*_: object) -> None:
            self.now += seconds
            self.waited += waiting

        return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def test_measuring_ends_when_time_is_over(fake: FakeTime) -> None:
    plan = TimingPlan(least=3, most=10**6, seconds=1.0)
    timing = measure([Variant("a", fake.takes(0.25))], CpuClock(), plan)
    assert len(timing.rounds["a"]) == 5
    disturbed = measure([Variant("a", fake.takes(0.25, waiting=0.2))], CpuClock(), plan)
    assert len(disturbed.rounds["a"]) == 13, "three times as long in the hope of quiet"


def test_cpu_clock_times_run_alone_and_marks_waiting_for_a_core(fake: FakeTime) -> None:
    variant = Variant("a", fake.takes(2.0), fake.takes(100.0))
    assert CpuClock().sample(variant, 3) == (2.0, False)
    assert CpuClock().sample(Variant("a", fake.takes(1.0, waiting=0.04)), 1) == (1.0, False)
    assert CpuClock().sample(Variant("a", fake.takes(1.0, waiting=0.06)), 1) == (1.0, True)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no scheduler statistics")
def test_waiting_for_a_busy_neighbour_is_seen() -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    program = f"import os\nos.sched_setaffinity(0, {one})\nprint('on', flush=True)\nwhile 1: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None and neighbour.stdout.readline() == b"on\n"
        os.sched_setaffinity(0, one)
        before = timer._waiting()
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        assert timer._waiting() - before > 0
    finally:
        os.sched_setaffinity(0, allowed)
        neighbour.kill()
        neighbour.wait()


def test_short_calls_are_repeated_within_a_sample(fake: FakeTime) -> None:
    assert CpuClock().repeat(Variant("short", fake.takes(20e-6))) == 11
    assert CpuClock().repeat(Variant("long", fake.takes(0.002))) == 1
    assert CpuClock().repeat(Variant("empty", fake.takes(0.0))) == 1000


def test_context_surrounds_prepare_and_run() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("exit")

    variant = Variant(
        "a", lambda _: events.append("run"), lambda: events.append("prepare"), context
    )
    CpuClock().sample(variant, 1)
    assert events == ["enter", "prepare", "run", "exit"]


def test_gpu_clock_flushes_and_fills_the_queue_before_the_first_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of the commands, with a stand-in for CUDA: it needs no GPU."""
    calls = mock.MagicMock()
    calls.Event.return_value.elapsed_time.return_value = 2.0
    calls.get_device_properties.return_value.L2_cache_size = 1 << 20
    for name in ("Event", "_sleep", "synchronize", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    clock = CudaClock(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: calls.flush(len(self)))
    variant = Variant("a", calls.run, calls.prepare)
    assert clock.repeat(variant) == 1
    calls.reset_mock()
    assert clock.sample(variant, 1) == (2e-3, False)
    names = [name.rpartition(".")[2] for name, *_ in calls.mock_calls]
    commands = ("prepare", "flush", "_sleep", "record", "run", "record", "synchronize")
    assert [name for name in names if name in commands] == [*commands]
    calls.flush.assert_called_once_with(64 << 20)


@pytest.mark.gpu
def test_gpu_clock_finds_a_known_ratio_and_not_the_launches() -> None:
    device = torch.device("cuda")
    x = torch.randn(64 << 20, device=device)
    small, large = (torch.empty_like(x[: n << 20]) for n in (16, 64))
    variants = [
        Variant("small", lambda _: small.copy_(x[: 16 << 20])),
        Variant("large", lambda _: large.copy_(x)),
        Variant("tiny", lambda _: [small[:64].copy_(x[:64]) for _ in range(4)]),
    ]
    timing = measure(variants, CudaClock(device), TimingPlan(least=10, most=30, seconds=1))
    assert 3 < timing.ratio("large", "small").median < 5
    # Four empty kernels back to back; waiting for the host would take several times as long.
    assert timing.spread("tiny").median < 30e-6
