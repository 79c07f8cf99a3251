"""The timer on functions and clocks whose times are known."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from fusedops.cli.timer import CpuClock, CudaClock, Plan, Spread, Timing, Variant, measure


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


def variants(*names: str) -> list[Variant]:
    return [Variant(name, lambda _: None) for name in names]


def test_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    timing = Timing(
        {"a": [2.0, 8.0, 3.0], "b": [1.0, 2.0, 3.0]}, {"a": [False] * 3, "b": [False] * 3}
    )
    assert timing.ratio("a", "b") == Spread(2.0, 1.5, 3.0, 3)
    assert timing.ratio("b", "b").median == 1.0


def test_drift_that_both_meet_cancels_out_of_the_ratio() -> None:
    clock = ScriptedClock(
        {
            "a": ((3.0 * 1.02**i, False) for i in itertools.count()),
            "b": ((1.0 * 1.02**i, False) for i in itertools.count()),
        }
    )
    timing = measure(variants("a", "b"), clock, Plan(least=5, most=30, seconds=60))
    assert timing.ratio("a", "b").median == pytest.approx(3.0)
    assert timing.spread("a").count == 30


def test_contended_samples_and_outliers_do_not_count() -> None:
    times = itertools.cycle([(1.0, False), (9.0, True), (1.2, False), (50.0, False), (1.1, False)])
    clock = ScriptedClock({"a": times, "b": ((2.0, False) for _ in itertools.count())})
    timing = measure(variants("a", "b"), clock, Plan(least=5, most=20, seconds=60))
    taken = len(timing.rounds["a"])
    assert set(timing.samples("a")) == {1.0, 1.1, 1.2}
    assert timing.discarded("a") == taken - len(timing.samples("a")) >= taken // 3
    assert timing.discarded("b") == 0
    assert timing.trusted("a")
    assert timing.ratio("b", "a").median == pytest.approx(2.0 / 1.1)


def test_only_contended_samples_are_reported_as_not_trusted() -> None:
    clock = ScriptedClock(
        {
            "quiet": ((1.0, False) for _ in itertools.count()),
            "busy": itertools.cycle([(12.0, True), (4.0, True)]),
        }
    )
    timing = measure(variants("quiet", "busy"), clock, Plan(least=3, most=8, seconds=0.001))
    assert timing.trusted("quiet") and not timing.trusted("busy")
    # Not 12: the shortest sample is the nearest to an undisturbed one.
    assert timing.ratio("busy", "quiet").median == 4.0


def test_order_changes_from_round_to_round() -> None:
    names = ("a", "b", "c")
    clock = ScriptedClock({name: ((1.0, False) for _ in itertools.count()) for name in names})
    measure(variants(*names), clock, Plan(least=20, most=20, seconds=60))
    rounds = [tuple(clock.order[i : i + 3]) for i in range(0, len(clock.order), 3)]
    assert all(sorted(each) == list(names) for each in rounds)
    assert len(set(rounds)) > 3


def test_measuring_ends_when_time_is_over() -> None:
    def slow(_: object) -> None:
        time.sleep(0.005)

    start = time.perf_counter()
    timing = measure([Variant("a", slow)], CpuClock(), Plan(least=3, most=10**6, seconds=0.05))
    assert len(timing.rounds["a"]) >= 3
    assert time.perf_counter() - start < 5


def test_cpu_clock_times_run_and_not_prepare() -> None:
    prepared: list[int] = []

    def prepare() -> int:
        time.sleep(0.02)
        prepared.append(1)
        return 7

    received: list[int] = []

    def run(value: int) -> None:
        time.sleep(0.002)
        received.append(value)

    seconds, _ = CpuClock().sample(Variant("a", run, prepare), 3)
    assert received == [7, 7, 7] and len(prepared) == 3
    # The bound is prepare's own time: a sample that included it would take 22 ms.
    assert 0.002 <= seconds < 0.022


def test_short_calls_are_repeated_within_a_sample() -> None:
    assert CpuClock().repeat(Variant("short", lambda _: None)) > 10
    assert CpuClock().repeat(Variant("long", lambda _: time.sleep(0.002))) == 1


def test_known_work_ratio_is_found() -> None:
    x = torch.randn(1 << 14)

    def work(times: int) -> Variant:
        def run(_: object) -> None:
            for _ in range(times):
                x.exp()

        return Variant(str(times), run)

    timing = measure([work(4), work(40)], CpuClock(), Plan(least=5, most=20, seconds=0.3))
    # Ten times the work; a timer that mixed up the two or timed the set-up would be far off.
    assert 3 < timing.ratio("40", "4").median < 30


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
    timing = measure(variants, CudaClock(device), Plan(least=10, most=30, seconds=1))
    assert 3 < timing.ratio("large", "small").median < 5
    # Four empty kernels back to back; waiting for the host would take several times as long.
    assert timing.spread("tiny").median < 30e-6


def test_context_surrounds_prepare_and_run() -> None:
    import contextlib

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
