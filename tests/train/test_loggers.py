"""Where metrics go besides ``metrics.jsonl``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train_runs import config

from fusedops.cli.report_page import page_data
from fusedops.train import InputError, train
from fusedops.train.loggers import Logger
from fusedops.train.metrics import Metrics

# By name: what asks for a logger, and the module that is imported for it.
SERVICES: dict[str, tuple[Any, str]] = {
    "tensorboard": (True, "torch.utils.tensorboard"),
    "wandb": ("project", "wandb"),
    "mlflow": ("experiment", "mlflow"),
}


@pytest.mark.parametrize("name", [*SERVICES, "safetensors"])
def test_what_is_not_installed_is_told_before_the_first_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, module = SERVICES.get(name, (None, name))
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    export = {"export": str(tmp_path / "weights")}
    with pytest.raises(InputError, match=f"(log.{name}|export) needs .*: pip install {name}"):
        train(config(tmp_path, **{"log": {name: value}} if value else export))
    assert not (tmp_path / "run").exists()


def _fail(*_: object, **__: object) -> None:
    raise ConnectionError("no route to host")


def test_a_logger_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(tmp_path, loggers=[Logger("mlflow", _fail)])
    for step in (1, 2):
        metrics.write({"step": step})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert caplog.messages == ["log.mlflow: no route to host; training continues"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_logger_that_does_not_start_does_not_end_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value, module = SERVICES[name]
    service = SimpleNamespace(init=_fail, SummaryWriter=_fail, is_tracking_uri_set=_fail)
    monkeypatch.setitem(sys.modules, module, service)
    assert train(config(tmp_path, steps=2, log={name: value, "peak_tflops": 1.0})).finished
    (warning,) = [text for text in caplog.messages if f"log.{name} cannot be used" in text]
    assert "no route to host" in warning and "continues without it" in warning
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_lines_are_json_also_where_a_number_is_not_finite(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.write({"step": 1, "loss": 2.0})
    for step, loss in ((2, float("nan")), (3, float("inf")), (4, 1.0)):
        metrics.write({"step": step, "loss": loss, "action": "skip"})
    metrics.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [2.0, None, None, 1.0]
    Metrics(tmp_path, step=3).close()
    assert page_data(tmp_path)["metrics"]["loss"] == {"steps": [1], "values": [2.0]}
