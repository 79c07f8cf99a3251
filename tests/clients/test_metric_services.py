"""Weights & Biases and MLflow get the metrics of a run, without a network."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fusedops.train import load_config
from fusedops.train.loggers import make_loggers
from fusedops.train.metrics import Metrics

pytestmark = pytest.mark.slow
LINES = [
    {"step": step, "loss": 3.0 / step, "action": "go", "tokens_per_second": 100.0}
    for step in (1, 2, 3, 2, 3, 4)  # with a rollback
]


def write(folder: Path, **log: str) -> None:
    folder.mkdir()
    table = {
        "out": str(folder),
        "steps": 4,
        "batch": 4,
        "model": {"preset": "tiny-gpt2"},
        "data": {"train": ["x.txt"], "seq_len": 8},
    }
    config = load_config({**table, "log": log})
    metrics = Metrics(folder, loggers=make_loggers(config, 0))
    for line in LINES:
        metrics.write(line)
    metrics.close()


def test_wandb_has_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    write(folder, wandb="fusedops-test")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = b""
    for _ in range(600):  # a process of wandb writes the file
        content = file.read_bytes()
        if b"optimizer.lr" in content:
            break
        time.sleep(0.1)
    assert b"tokens_per_second" in content and b"loss" in content and b"optimizer.lr" in content


def test_mlflow_has_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    write(folder, mlflow="fusedops-test")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("fusedops-test")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 2, 3, 3, 4]
    assert run.data.params["optimizer.lr"]
