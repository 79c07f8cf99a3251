"""``fusedops bench device``: a file that the planner reads, fitted on steps that were run here."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fusedops.bench import device as bench
from fusedops.bench import scaling
from fusedops.bench.small_models import SmallModel
from fusedops.cli.main import app
from fusedops.planner import load_device


@pytest.mark.ci
def test_the_command_writes_a_device_that_predicts_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = (SmallModel("gpt2", 64, 2, 128), 2, 16, 2)
    other = (SmallModel("gpt2", 64, 1, 128), 1, 16, 1)
    monkeypatch.setattr(bench, "sizes", lambda *, quick=False: [case, other])
    monkeypatch.setattr(bench, "_TOGETHER", ({"dp": 2}, {"tp": 2}))
    results, measure = [], bench.measure_device

    def kept(*args: Any, **options: Any) -> bench.MeasuredDevice:
        results.append(measure(*args, **options))
        return results[-1]

    monkeypatch.setattr(bench, "measure_device", kept)
    file, links = tmp_path / "mine.toml", tmp_path / "links.json"
    curve = {"collective": "all_reduce", "backend": "gloo", "ranks": 2, "latency": 0.0}
    links.write_text(json.dumps({"curves": [curve | {"slopes": [1e-9], "knees": []}]}))
    words = ["bench", "device", "--out", str(file), "--seconds", "0.01", "--links", str(links)]
    app([*words, "--quick", "--dtype", "float32"], standalone_mode=False)
    (measured,) = results
    together = 2 if len(os.sched_getaffinity(0)) > 1 else 0
    assert len(measured.steps) == len(measured.errors) == 2 + together
    assert [(step.shape.dp, step.shape.tp) for step in measured.steps[2:]] == (
        [(2, 1), (1, 2)][:together]
    )
    first = measured.steps[0].shape
    assert (first.hidden, first.micro_batch, first.microbatches, first.seq_len) == (64, 2, 2, 16)
    assert all(math.isfinite(error) for error in measured.errors)
    own = load_device(file)
    # The all-reduce of two ranks sends each byte once, at 1 GB/s, of which 0.7 is the usual share.
    assert own.links.node == pytest.approx(1e9 / 0.7, rel=1e-5)
    assert own.peak["float32"] > 1e9 and own.memory.bandwidth > 1e8
    assert f"fitted on {2 + together} steps" in own.sources["efficiency"]
    assert "fusedops plan time --device" in capsys.readouterr().out


def test_settings_of_the_scaling_benchmark_are_predicted() -> None:
    work = scaling.ScalingWork("gpt2", 256, 4, 512, 8, 128)
    own = load_device("a100-80")
    seconds = {
        name: scaling.predicted(work, setting, [own]) for name, setting in scaling.SETTINGS.items()
    }
    assert seconds["patched transformers"] is None
    others = [value for value in seconds.values() if value is not None]
    assert len(others) == len(scaling.SETTINGS) - 1 and min(others) > 0
    plain, pipeline = seconds["one process, 8 parts"], seconds["pp 2"]
    assert plain is not None and pipeline is not None and pipeline < plain
