"""bench/cpu_peers: processes that take turns, the record of several runs, and the page's table."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "cpu_peers"))

import measure  # noqa: E402
import ways  # noqa: E402

CONTESTS = """
import os
import time
import torch
from ways import Contest, Running, Way

def way(seconds, value):
    return Running(lambda _: time.sleep(seconds), [torch.tensor([value])])

def missing():
    raise ImportError("no such package")

def dies():
    os._exit(3)

def contests():
    found = {
        "ours": Way(lambda: way(0.002, 1.0)),
        "slow": Way(lambda: way(0.02, 1.5), process="slow"),
        "absent": Way(missing, process="slow"),
        "dead": Way(dies, process="dead"),
    }
    return [Contest("sleep", "float32", lambda: [torch.ones(1)], found, "ours", 2)]
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[measure.Workers]:
    """Processes that know a kind of work with a slow way, one without a package and a crash."""
    (tmp_path / "sleeping_work.py").write_text(CONTESTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(measure, "SAMPLE", 0.004)
    found = measure.Workers(threads=1)
    yield found
    found.close()
    sys.modules.pop("sleeping_work")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """docs/results.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("docs_results", ROOT / "docs" / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ways_of_several_processes_are_compared(workers: measure.Workers) -> None:
    rows = {row["way"]: row for row in measure.run_contest(workers, "sleeping", 0, 0.1)}
    assert rows["slow"]["difference"] == pytest.approx(0.5)
    assert rows["ours"]["ratio"]["median"] == 1.0
    assert rows["slow"]["seconds"]["median"] >= 0.02
    assert rows["slow"]["ratio"]["median"] > 2
    assert rows["absent"]["reason"] == "ImportError: no such package"
    assert rows["dead"]["reason"] == "its process ended with exit code 3"


def test_difference_is_of_the_worst_tensor() -> None:
    reference = [torch.tensor([3.0, 4.0]), torch.tensor([100.0])]
    outputs = [torch.tensor([3.0, 5.0]), torch.tensor([101.0])]
    assert ways.difference(outputs, reference) == pytest.approx(0.2)


def _row(work: str, way: str, **given: object) -> dict[str, object]:
    row = {"work": work, "contest": "float32", "way": way, "dtype": "float32", "ours": "fusedops"}
    return row | {"tokens": 0} | given


def test_a_part_replaces_its_contests_alone() -> None:
    before = {"kinds": {"loss": {"created": "then", "rows": [_row("a", "x"), _row("b", "x")]}}}
    part = {"created": "now", "rows": [_row("b", "y"), _row("c", "y")]}
    record = measure.merged(before, "loss", part)
    found = [(row["work"], row["way"]) for row in record["kinds"]["loss"]["rows"]]
    assert found == [("a", "x"), ("b", "y"), ("c", "y")]
    assert record["kinds"]["loss"]["created"] == "now"


def test_table_names_slower_ours_and_missing_peers(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(seconds: float, ratio: float) -> dict[str, object]:
        spread = {"median": ratio, "q1": ratio - 0.1, "q3": ratio + 0.1, "count": 5}
        return {
            "seconds": {"median": seconds},
            "ratio": spread,
            "undisturbed": True,
            "difference": 1e-6,
            "version": "peer 1.2",
        }

    rows = [
        _row("decoding", "fusedops", **timed(0.5, 1.0), tokens=32),
        _row("decoding", "fast", **timed(0.25, 0.5), tokens=32, dtype="Q4_0"),
        _row("decoding", "absent", reason="ImportError: no such package", tokens=32),
    ]
    part = {"machine": {"threads": 2}, "created": "2026-11-30T20:00:00", "rows": rows}
    (tmp_path / "cpu-zen4").mkdir()
    (tmp_path / "cpu-zen4" / "peers.json").write_text(json.dumps({"kinds": {"decoders": part}}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.peers_table().splitlines()
    assert lines[0] == "### Generation"
    assert lines[-2] == (
        "| decoding | fast (peer 1.2) | Q4_0, ours float32 | 128.0 tokens/s | 64.0 tokens/s "
        "| 0.50 (0.40-0.60) | 1e-06 |"
    )
    assert lines[-1] == (
        "| decoding | absent | float32 | ImportError: no such package | 64.0 tokens/s | | |"
    )


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        measure.main(["--kinds", "loss,typo"])
    assert ended.value.code == 2
    assert "--kinds must be of loss, layers" in capsys.readouterr().err
