"""On GPUs sections and waits are times of the stream, and recording them makes no host wait.

The devices are stand-ins (``fusedops.testing.cluster_step``): a kernel runs at once on its rank's
thread, and events have the time of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from fusedops.models import ParallelConfig
from fusedops.parallel.comm import collectives
from fusedops.profiler import Detector, Finding, ModuleTimer, RunShape, StepRecorder, read_timings
from fusedops.profiler.timings import SECTIONS, column
from fusedops.testing import cluster_step, stand_in_cuda
from tests.profiler.test_module_timer import Slow, train
from tests.testing.test_cluster_step import training_step

RANKS = 4
SHAPE = RunShape({"pp": 1, "dp": RANKS, "cp": 1, "tp": 1, "ep": 1}, device="cuda")


class Clock:
    """The time of all devices, which only computing moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_slow_rank_is_named_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, detector = Clock(), Detector(SHAPE)
    monkeypatch.setattr(stand_in_cuda, "time", clock)
    found: list[Finding] = []
    rows: list[torch.Tensor] = []

    def look(step: int, of_ranks: torch.Tensor) -> None:
        rows.append(of_ranks)
        found.extend(detector.update(step, of_ranks))

    def make() -> Callable[[], None]:
        group, numbers = dist.group.WORLD, iter(range(1, 1000))
        assert group is not None
        recorder = StepRecorder(SHAPE, groups={"dp": group.group_name}, every=5, handler=look)

        def step() -> None:
            number = next(numbers)
            is_slow = dist.get_rank() == 2 and number > 8
            with collectives.recorded() as log, recorder.step(number, log):
                with recorder.section("forward"):
                    clock.now += 0.006 if is_slow else 0.003
                with recorder.section("backward"):
                    clock.now += 0.002
                    collectives.all_reduce(torch.ones(100, device="cuda"), group).wait()

        return step

    cluster_step(make, RANKS, warm_up=30)
    assert [(finding.kind, finding.ranks, finding.section) for finding in found] == [
        ("rank", (2,), "forward")
    ]
    # The gathering after step 30 has all steps but the last, which the device may still compute.
    assert len(rows) == 29
    last = rows[-1]
    expected = torch.tensor([0.003, 0.003, 0.006, 0.003])
    torch.testing.assert_close(last[:, column("forward")], expected)
    # Ranks that are threads compute one after another: the first one waits for all others, and its
    # backward does not contain that.
    assert float(last[:, column("blocked_dp")].max()) > 0.01
    torch.testing.assert_close(last[:, column("backward")], torch.full((RANKS,), 0.002))


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 2}])
def test_recording_a_training_step_on_gpus_makes_no_host_wait(layout: dict[str, int]) -> None:
    rows: list[torch.Tensor] = []

    def make() -> Callable[[], None]:
        step = training_step("tiny-llama", ParallelConfig(**layout))()
        shape = RunShape(dict.fromkeys(SHAPE.sizes, 1) | {"dp": 2}, device="cuda")
        recorder = StepRecorder(shape, every=3, handler=lambda _, of_ranks: rows.append(of_ranks))
        numbers = iter(range(1, 1000))

        def recorded_step() -> None:
            number = next(numbers)
            with collectives.recorded() as log, recorder.step(number, log):
                with recorder.section("backward"):
                    step()
            recorder.blocked_share()

        return recorded_step

    assert cluster_step(make, 2, warm_up=3).waits() == {}
    assert len(rows) == 2
    for of_ranks in rows:
        assert float(of_ranks[:, column("backward")].min()) > 0
        assert float(of_ranks[:, column("blocked_world")].min()) > 0


def test_the_row_of_a_step_waits_until_the_device_has_completed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[float | None] = []
    rows: list[int] = []

    def make() -> Callable[[], None]:
        shape = RunShape(dict.fromkeys(SHAPE.sizes, 1), device="cuda")
        recorder = StepRecorder(shape, every=100, handler=lambda step, _: rows.append(step))

        def step() -> None:
            is_complete = False
            monkeypatch.setattr(torch.cuda.Event, "query", lambda _: is_complete)
            for number in (1, 2):
                with recorder.step(number):
                    time.sleep(0.001)
            shares.append(recorder.blocked_share())
            is_complete = True
            with recorder.step(3):
                shares.append(recorder.blocked_share())
            is_complete = False
            recorder.flush()

        return step

    report = cluster_step(make, 1, warm_up=0)
    assert shares == [None, 0.0] and rows == [1, 2, 3]
    assert [what for what, _ in report.waits()] == ["Event.synchronize"]


def test_a_stream_that_copies_makes_the_step_wait_for_nothing() -> None:
    rows: list[torch.Tensor] = []

    def make() -> Callable[[], None]:
        group = dist.group.WORLD
        assert group is not None
        shape = RunShape({"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 1}, device="cuda")
        recorder = StepRecorder(shape, every=1, handler=lambda _, row: rows.append(row))
        other = torch.cuda.Stream()

        def step() -> None:
            with collectives.recorded() as log, recorder.step(1, log):
                for stream in (None, other):
                    with torch.cuda.stream(stream):
                        collectives.all_reduce(torch.ones(1, device="cuda"), group).wait()
            ends = [event for event in log.events if event.phase == "end"]
            recorder.flush()
            if dist.get_rank() == 0:
                first = ends[0].on_stream
                assert first is not None
                seconds = 1e-3 * first.begin.elapsed_time(first.end)
                blocked = rows[-1][0, column("blocked_world")]
                torch.testing.assert_close(float(blocked), seconds, rtol=1e-5, atol=0.0)
                assert float(rows[-1][0, column("bytes_world")]) == 8.0

        return step

    cluster_step(make, 2)
    assert len(rows) == 2


def test_modules_of_other_trainers_are_timed_by_their_stream(tmp_path: Path) -> None:
    def make() -> Callable[[], None]:
        return lambda: train(ModuleTimer(tmp_path, every=2), Slow(device="cuda"), 3, microbatches=2)

    cluster_step(make, 1, warm_up=0)
    timings = read_timings(tmp_path)
    assert timings.shape.device == "cuda" and timings.steps == [1, 2, 3]
    assert float(timings.of("forward").min()) >= 0.02
    assert float(timings.of("backward").min()) > 0
    own = torch.stack([timings.of(name) for name in SECTIONS]).sum(0)
    torch.testing.assert_close(own, timings.of("step"))
