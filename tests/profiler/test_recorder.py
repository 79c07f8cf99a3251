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
    waits = [(3.5, 4.0), (6.0, 8.0), (17.0, 20.0)]
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


FAULT_STEP = 16
TWO = ONE | {"dp": 2}
STAGES = ONE | {"pp": 2, "dp": 4}
EXPERTS = ONE | {"dp": 8, "ep": 8}


def job(
    rank: int, kind: str, late: tuple[int, ...], section: str, sizes: dict[str, int]
) -> list[Finding]:
    """Return what the first rank finds while some ranks have a fault from a step on."""
    from torch import distributed as dist

    from fusedops.parallel.comm import collectives

    group = dist.group.WORLD
    assert group is not None
    shape = RunShape(sizes)
    detector = Detector(shape)
    found: list[Finding] = []

    def reduce(delay: float) -> None:
        pending = collectives.all_reduce(torch.ones(1000), group)
        finish = pending._finish
        assert finish is not None

        def delayed() -> torch.Tensor:
            result = finish()
            time.sleep(delay)
            return result

        pending._finish = delayed
        pending.wait()

    def work(name: str, step: int) -> None:
        here = rank in late and step >= FAULT_STEP and name == section
        slow = here and kind in ("rank", "stage", "data", "experts")
        time.sleep(0.02 if slow else 0.01)
        if here and kind == "pause" and step == FAULT_STEP:
            time.sleep(0.3)
        if name == "backward":
            recorder.count(pairs=3e6 if here and kind == "data" else 1e6)
            recorder.count(expert_rows=3e3 if here and kind == "experts" else 1e3)
            reduce(0.015 if kind == "link" and step >= FAULT_STEP else 0.0)

    with StepRecorder(
        shape,
        groups={"dp": group.group_name},
        every=5,
        handler=lambda *step: found.extend(detector.update(*step)),
    ) as recorder:
        for step in range(1, 41):
            with collectives.recorded() as log, recorder.step(step, log):
                for name in ("data", "forward", "backward", "optimizer"):
                    with recorder.section(name):
                        work(name, step)
    return found


def assert_named(found: list[Finding], kind: str, ranks: tuple[int, ...], section: str) -> None:
    named = [finding for finding in found if finding.kind == kind]
    assert named, found
    # Another process of the machine may take a core from a rank at any step: what it costs is
    # smaller than the fault.
    worst = max(named, key=lambda finding: finding.factor)
    assert worst.ranks == ranks and worst.section == section, found
    # A step just before the fault may have been slow for the same reason. How soon a fault is
    # found, test_detection.py asks with simulated times.
    assert worst.since >= FAULT_STEP - 4, found


@pytest.mark.parametrize(
    ("kind", "late", "section", "sizes"),
    [
        ("rank", (1,), "forward", TWO),
        ("rank", (0,), "backward", TWO),
        ("rank", (1,), "optimizer", TWO),
        ("rank", (0,), "data", TWO),
        ("link", (0, 1), "dp", TWO),
        ("pause", (1,), "forward", TWO),
        ("stage", (4, 5, 6, 7), "forward", STAGES),
        ("rank", (6,), "backward", STAGES),
        ("data", (3,), "backward", EXPERTS),
        ("experts", (5,), "backward", EXPERTS),
    ],
)
def test_on_processes_the_cause_is_named_not_the_one_that_waits(
    on_processes: Any, kind: str, late: tuple[int, ...], section: str, sizes: dict[str, int]
) -> None:
    size = sizes["pp"] * sizes["dp"]
    found, *others = on_processes(job, size, kind, late, section, sizes)
    assert others == [[]] * (size - 1)
    assert_named(found, kind, late, section)


def test_on_processes_nothing_is_found_in_a_healthy_job(on_processes: Any) -> None:
    found, _ = on_processes(job, 2, "none", (), "forward", TWO)
    assert not [finding for finding in found if finding.kind in ("link", "stage")]
