"""``fusedops bench device``: a file that the planner reads, fitted on steps that were run here."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from fusedops.bench import device as bench
from fusedops.bench import scaling
from fusedops.bench.small_models import SmallModel
from fusedops.cli.main import app
from fusedops.planner import load_device
from fusedops.planner.communication import CommunicationCurve, CommunicationModel


@pytest.mark.ci
def test_the_command_writes_a_device_that_predicts_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    app(
        ["bench", "device", "--out", str(file), "--quick", "--seconds", "0.1"],
        standalone_mode=False,
    )
    own = load_device(file)
    assert own.peak["float32"] > 1e9 and own.memory.bandwidth > 1e8
    steps = 23 if len(os.sched_getaffinity(0)) > 1 else 16
    assert f"fitted on {steps} steps" in own.sources["efficiency"]
    assert "fusedops plan time --device" in capsys.readouterr().out


@pytest.mark.ci
def test_errors_are_those_of_the_fitted_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = (SmallModel("gpt2", 64, 2, 128), 2, 16, 2)
    other = (SmallModel("gpt2", 64, 1, 128), 1, 16, 1)
    monkeypatch.setattr(bench, "sizes", lambda *, quick=False: [case, other])
    monkeypatch.setattr(bench, "_TOGETHER", ({"dp": 2}, {"tp": 2}))
    said: list[str] = []
    curve = CommunicationCurve(0.0, (1e-9,))
    links = CommunicationModel({("all_reduce", "gloo", "2"): curve})
    measured = bench.measure_device(
        torch.device("cpu"), [torch.float32], 0.01, said.append, links=links, quick=True
    )
    together = 2 if len(os.sched_getaffinity(0)) // torch.get_num_threads() > 1 else 0
    assert len(measured.steps) == len(measured.errors) == 2 + together
    assert len(said) == 3 + bool(together)
    assert [(step.shape.dp, step.shape.tp) for step in measured.steps[2:]] == (
        [(2, 1), (1, 2)][:together]
    )
    first = measured.steps[0].shape
    assert (first.hidden, first.micro_batch, first.microbatches, first.seq_len) == (64, 2, 2, 16)
    assert all(math.isfinite(error) for error in measured.errors)
    # The all-reduce of two ranks sends each byte once, at 1 GB/s, of which 0.7 is the usual share.
    assert measured.device.links.node == pytest.approx(1e9 / 0.7)


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
