"""``fusedops profile`` shows the records of a run: the slow rank, what it costs, and files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fusedops.cli.main import app
from fusedops.profiler import RunShape, TimingsWriter
from fusedops.profiler.timings import memory_file
from tests.profiler.simulated import Fault, steps

SHAPE = RunShape({"pp": 2, "dp": 4, "cp": 1, "tp": 2, "ep": 1})


def recorded(folder: Path, fault: Fault | None) -> Path:
    writer = TimingsWriter(folder, SHAPE)
    for step, rows in steps(SHAPE, 40, random.Random(3), fault):
        writer.write(step, rows)
    writer.close()
    return folder


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    return recorded(folder, Fault("rank", (11,), "backward", 4, 0.5))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["profile", *arguments], standalone_mode=False)
    return " ".join(capsys.readouterr().out.split())


def test_the_slow_rank_is_named_with_what_it_costs(
    slow_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, str(slow_run))
    assert "16 ranks (pp 2, dp 4, tp 2), 40 steps" in text
    assert "rank 11 is 1.4" in text and "(backward)" in text
    assert "if rank 11 were as fast as the median" in text


def test_the_json_says_what_a_step_could_take(
    slow_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(run(capsys, str(slow_run), "--json", "-"))
    best = record["what_if"][0]
    assert (best["name"], best["ranks"]) == ("rank", [11])
    usual = json.loads(run(capsys, str(recorded(tmp_path, None)), "--json", "-"))
    step = max(times["step"] for times in usual["ranks"])
    assert best["seconds"] == pytest.approx(step, rel=0.1)
    assert {group["kind"] for group in record["groups"]} == {"tp", "dp", "pp", "world"}


def test_the_memory_of_the_rank_that_allocates_most_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path, None)
    for rank in (0, 5):
        layers = {"": {"gradient": 1 << 19}, "layers.0": {"activation": (rank + 1) << 20}}
        record = {"step": 3, "rank": rank, "dynamic": rank << 20, "layers": layers}
        memory_file(folder, rank).write_text(json.dumps(record))
    memory_file(folder, 7).write_text('{"rank": 7, "lay')
    text = run(capsys, str(folder))
    assert "of step 3, rank 5" in text and "(outside)" in text and "6.0" in text


def test_a_trace_of_recorded_steps_is_refused(
    slow_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(capsys, str(slow_run), "--trace", str(tmp_path / "trace.json"))
    assert "merges traces of torch.profiler" in " ".join(capsys.readouterr().err.split())


def test_two_runs_are_compared(
    slow_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, str(slow_run), "--compare", str(recorded(tmp_path, None)))
    assert "computing" in text and "difference" in text and "1.4" in text


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_wrong_folder_is_one_sentence(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / what
    if what == "empty":
        folder.mkdir()
    with pytest.raises(SystemExit):
        app(["profile", str(folder)], standalone_mode=False)
    words = "does not exist" if what == "missing" else "has no traces"
    assert words in " ".join(capsys.readouterr().err.split())
