"""The file of a run's times: what was written is read, whatever happened to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fusedops.launch.config_table import InputError
from fusedops.profiler import RunShape, TimingsWriter, read_timings
from fusedops.profiler.timings import FIELDS, FOLDER, HEADER, STEPS, column

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
