"""Training on one process: the loss falls, and what is written says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusedops.train import train


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration that trains in seconds."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{n} plus {n} is {2 * n}.\n" for n in range(400)))
    return {
        "out": str(folder / "run"),
        "steps": 12,
        "batch": 4,
        "device": "cpu",
        "tune_host": False,
        "model": {"preset": "tiny-gpt2"},
        "data": {"train": [str(text)], "seq_len": 32},
        "optimizer": {"lr": 1e-2},
        "log": {"peak_tflops": 1.0},
        "checkpoint": {"every": 5},
        "validation": {"every": 6, "sequences": 6},
    } | changes


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(each) for each in (folder / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
    ]


def test_the_loss_falls_and_metrics_tell(tmp_path: Path) -> None:
    result = train(config(tmp_path))
    found = lines(tmp_path)
    assert result.finished and [each["step"] for each in found] == list(range(12))
    assert found[-1]["loss"] == result.loss and result.loss < found[0]["loss"] - 1
    assert [each["step"] for each in found if "validation_loss" in each] == [5, 11]
    assert abs(found[-1]["validation_loss"] - result.loss) < 1
    for each in found:
        assert each["tokens_per_second"] == pytest.approx(128 / each["seconds"])
        assert each["memory_bytes"] > 2**20 and 0 < each["mfu"] < 1
