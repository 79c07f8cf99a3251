"""A recorder separates what a rank does from what it waits for, and its file is read again."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops.launch.config_table import InputError
from fusedops.profiler import (
    Detector,
    Finding,
    RunShape,
    StepRecorder,
    TimingsWriter,
    read_timings,
)
from fusedops.profiler.recorder import own_seconds
from fusedops.profiler.timings import FIELDS, FOLDER, HEADER, STEPS, column

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
        time.sleep(0.02 if here and kind == "rank" else 0.01)
        if here and kind == "pause" and step == FAULT_STEP:
            time.sleep(0.3)
        if name == "backward":
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


@pytest.mark.ci(every=3)
@pytest.mark.parametrize(
    ("kind", "late", "section", "sizes"),
    [
        ("rank", (1,), "forward", TWO),
        ("rank", (0,), "backward", TWO),
        ("rank", (1,), "optimizer", TWO),
        ("rank", (0,), "data", TWO),
        ("link", (0, 1), "dp", TWO),
        ("pause", (1,), "forward", TWO),
        ("rank", (6,), "backward", STAGES),
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


SHAPE = RunShape({"pp": 2, "dp": 2, "cp": 1, "tp": 1, "ep": 1})


def rows(step: int) -> torch.Tensor:
    return torch.arange(4 * len(FIELDS), dtype=torch.float32).view(4, -1) + 1000.0 * step


def written(folder: Path, steps: list[int]) -> Path:
    writer = TimingsWriter(folder, SHAPE)
    for step in steps:
        writer.write(step, rows(step))
    writer.close()
    return folder / FOLDER / STEPS


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, [1, 2])
    written(tmp_path, [3])  # of a process that resumes
    timings = read_timings(tmp_path)
    assert timings.shape == SHAPE and timings.steps == [1, 2, 3] and timings.notes == []
    assert torch.equal(timings.values, torch.stack([rows(step) for step in (1, 2, 3)]))
    assert torch.equal(timings.of("gc")[1], rows(2)[:, column("gc")])
    assert read_timings(tmp_path / FOLDER).steps == [1, 2, 3]


def test_a_repeated_step_counts_as_its_last_record(tmp_path: Path) -> None:
    file = written(tmp_path, [1, 2, 3])
    writer = TimingsWriter(tmp_path, SHAPE)
    writer.write(2, rows(7))
    writer.close()
    timings = read_timings(tmp_path)
    assert timings.steps == [1, 2, 3] and torch.equal(timings.values[1], rows(7))
    assert "1 steps were repeated" in timings.notes[0] and file.exists()


@pytest.mark.parametrize("lost", [1, 3, 100])
def test_half_a_record_is_ignored_and_overwritten(tmp_path: Path, lost: int) -> None:
    file = written(tmp_path, [1, 2])
    data = file.read_bytes()
    file.write_bytes(data[:-lost])
    timings = read_timings(tmp_path)
    assert timings.steps == [1] and "the last record is incomplete" in timings.notes[0]
    written(tmp_path, [2])
    assert file.read_bytes() == data


def test_a_run_of_another_shape_keeps_the_former_records(tmp_path: Path) -> None:
    written(tmp_path, [1])
    other = RunShape({"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1})
    TimingsWriter(tmp_path, other).close()
    assert read_timings(tmp_path).shape == other and read_timings(tmp_path).steps == []
    assert read_timings(tmp_path / f"{FOLDER}-1").steps == [1]


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="log.timings above 0"):
        read_timings(tmp_path)
    written(tmp_path, [1])
    header = tmp_path / FOLDER / HEADER
    text = header.read_text()
    header.write_text(text[:50])
    with pytest.raises(InputError, match="is damaged"):
        read_timings(tmp_path)
    header.write_text(json.dumps(json.loads(text) | {"version": 99}))
    with pytest.raises(InputError, match="another version"):
        read_timings(tmp_path)


def test_groups_are_those_of_the_mesh() -> None:
    assert SHAPE.groups("dp") == [[0, 1], [2, 3]] and SHAPE.groups("pp") == [[0, 2], [1, 3]]
    assert SHAPE.groups("world") == [[0, 1, 2, 3]]
    assert [SHAPE.stage_of(rank) for rank in range(4)] == [0, 0, 1, 1]
