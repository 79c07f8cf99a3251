"""A recorder separates what a rank does from what it waits for, also on real processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedops.profiler import Detector, Finding, RunShape, StepRecorder
from fusedops.profiler.recorder import own_seconds
from fusedops.profiler.timings import column

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1}


def test_a_section_has_neither_its_waits_nor_the_sections_inside_it() -> None:
    spans = [("data", 0.0, 1.0), ("backward", 1.0, 9.0), ("forward", 2.0, 5.0)]
    waits = [(4.0, 0.5), (8.0, 2.0), (20.0, 3.0)]
    assert own_seconds(spans, waits) == {"data": 1.0, "backward": 3.0, "forward": 2.5}


def recorded(steps: Callable[[StepRecorder], None]) -> list[tuple[int, torch.Tensor]]:
    rows: list[tuple[int, torch.Tensor]] = []
    shape = RunShape(ONE)
    with StepRecorder(shape, every=1, handler=lambda step, row: rows.append((step, row))) as one:
        steps(one)
    return rows


def test_the_sections_of_a_step_are_its_time() -> None:
    def steps(recorder: StepRecorder) -> None:
        with recorder.step(7):
            with recorder.section("backward"):
                time.sleep(0.02)
                with recorder.section("forward"):
                    time.sleep(0.03)
            with recorder.section("validation"), recorder.section("forward"):
                recorder.count(tokens=5.0)
                time.sleep(0.01)
            recorder.count(tokens=3.0)
            time.sleep(0.005)

    ((step, rows),) = recorded(steps)
    found = {name: float(rows[0, column(name)]) for name in ("backward", "forward", "validation")}
    assert step == 7 and float(rows[0, column("tokens")]) == 3.0
    assert found["forward"] >= 0.03 and found["backward"] >= 0.02 and found["validation"] >= 0.01
    other = float(rows[0, column("other")])
    assert other >= 0.005
    assert sum(found.values()) + other == pytest.approx(float(rows[0, column("step")]), rel=1e-3)
    assert float(rows[0, column("memory")]) > 1e6


def test_the_pauses_of_the_collector_are_counted() -> None:
    def steps(recorder: StepRecorder) -> None:
        with recorder.step(1):
            gc.collect()
        with recorder.step(2):
            pass

    first, second = recorded(steps)
    assert float(first[1][0, column("gc")]) > 0 and float(second[1][0, column("gc")]) >= 0
    assert all(not getattr(call, "__self__", None) for call in gc.callbacks if "Step" in str(call))


def test_a_section_that_does_not_exist_is_refused() -> None:
    with StepRecorder(RunShape(ONE)) as recorder, recorder.step(1):
        with (
            pytest.raises(ValueError, match="did you mean 'forward'"),
            recorder.section("forwards"),
        ):
            pass
    with pytest.raises(ValueError, match="every must be at least 1"):
        StepRecorder(RunShape(ONE), every=0)


def job(world: Any, late: int, section: str) -> list[Finding]:
    """Return what the first of two ranks finds while one of them is late in a section."""
    from torch import distributed as dist

    from fusedops.parallel.comm import collectives

    group = dist.group.WORLD
    assert group is not None
    shape = RunShape(ONE | {"dp": 2})
    detector = Detector(shape)
    found: list[Finding] = []
    names = {"dp": group.group_name}
    sections = ("data", "forward", "backward", "optimizer")
    with StepRecorder(
        shape, groups=names, every=5, handler=lambda *step: found.extend(detector.update(*step))
    ) as recorder:
        for step in range(1, 31):
            with collectives.recorded() as log, recorder.step(step, log):
                for name in sections:
                    with recorder.section(name):
                        is_late = world.rank == late and step > 15 and name == section
                        time.sleep(0.02 if is_late else 0.01)
                        if name == "backward":
                            gradient = torch.ones(1000)
                            collectives.all_reduce(gradient, group).wait()
    return found


@pytest.mark.parametrize(
    ("late", "section"), [(1, "forward"), (0, "backward"), (1, "optimizer"), (0, "data")]
)
def test_on_processes_the_late_one_is_named_not_the_one_that_waits(
    on_two_ranks: Callable[..., list[Any]], late: int, section: str
) -> None:
    found, others = on_two_ranks(job, late, section)
    named = [finding for finding in found if finding.kind == "rank"]
    assert others == [] and named, found
    assert named[0].ranks == (late,) and named[0].section == section
    assert named[0].since >= 16 and named[0].step <= 26
