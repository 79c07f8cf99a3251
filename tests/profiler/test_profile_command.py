"""``fusedops profile`` shows the records of a run: the slow rank, what it costs, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedops.profiler import RunShape
from fusedops.profiler.timings import memory_file
from tests.profiler.simulated import Fault, write_run

SHAPE = RunShape({"pp": 2, "dp": 4, "cp": 1, "tp": 2, "ep": 1})
Command = Callable[..., str]


def healthy_run(folder: Path) -> Path:
    return write_run(folder, SHAPE, 40, seed=3)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fault = Fault("rank", (11,), "backward", 4, 0.5)
    return write_run(tmp_path_factory.mktemp("slow"), SHAPE, 40, 3, fault)


def test_the_slow_rank_is_named_with_what_it_costs(slow_run: Path, output_of: Command) -> None:
    text = output_of("profile", slow_run)
    assert "16 ranks (pp 2, dp 4, tp 2), 40 steps" in text
    assert "rank 11 is 1.4" in text and "(backward)" in text
    assert "if rank 11 were as fast as the median" in text


def test_the_json_says_what_a_step_could_take(
    slow_run: Path, tmp_path: Path, output_of: Command
) -> None:
    record = json.loads(output_of("profile", slow_run, "--json", "-"))
    best = record["what_if"][0]
    assert (best["name"], best["ranks"]) == ("rank", [11])
    usual = json.loads(output_of("profile", healthy_run(tmp_path), "--json", "-"))
    step = max(times["step"] for times in usual["ranks"])
    assert best["seconds"] == pytest.approx(step, rel=0.1)
    assert {group["kind"] for group in record["groups"]} == {"tp", "dp", "pp", "world"}


def test_the_memory_of_the_rank_that_allocates_most_is_shown(
    tmp_path: Path, output_of: Command
) -> None:
    folder = healthy_run(tmp_path)
    for rank in (0, 5):
        layers = {"": {"gradient": 1 << 19}, "layers.0": {"activation": (rank + 1) << 20}}
        record = {"step": 3, "rank": rank, "dynamic": rank << 20, "layers": layers}
        memory_file(folder, rank).write_text(json.dumps(record))
    memory_file(folder, 7).write_text('{"rank": 7, "lay')
    text = output_of("profile", folder)
    assert "of step 3, rank 5" in text and "(outside)" in text and "6.0" in text


def test_two_runs_are_compared(slow_run: Path, tmp_path: Path, output_of: Command) -> None:
    text = output_of("profile", slow_run, "--compare", healthy_run(tmp_path))
    assert "computing" in text and "difference" in text and "1.4" in text


def test_mistakes_are_one_sentence(slow_run: Path, tmp_path: Path, error_of: Command) -> None:
    trace = ("--trace", tmp_path / "trace.json")
    assert "merges traces of torch.profiler" in error_of("profile", slow_run, *trace)
    assert "does not exist" in error_of("profile", tmp_path / "missing")
    assert "has no traces" in error_of("profile", tmp_path)
