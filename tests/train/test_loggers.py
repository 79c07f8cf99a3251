"""Where metrics go besides ``metrics.jsonl``, and the curves that a run leaves."""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from fusedops.train import InputError, loggers, train
from fusedops.train.curves import CURVES, draw_curves
from fusedops.train.loggers import COLUMNS, CsvLogger
from fusedops.train.metrics import Metrics


def config(folder: Path, steps: int, **log: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("abc def " * 300)
    return {
        "out": str(folder / "run"),
        "steps": steps,
        "batch": 2,
        "device": "cpu",
        "model": {"preset": "tiny-gpt2"},
        "data": {"train": [str(text)], "seq_len": 16},
        "log": {"peak_tflops": 1.0, **log},
        "checkpoint": {"every": 2},
    }


def test_a_csv_has_the_lines_of_all_steps_also_after_a_second_start(tmp_path: Path) -> None:
    train(config(tmp_path, 3, csv=True))
    train(config(tmp_path, 5, csv=True))
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    for row, line in zip(rows, lines, strict=True):
        record = json.loads(line)
        assert float(row["loss"]) == record["loss"] and row["action"] == record["action"]
        assert set(record) <= set(COLUMNS)


def test_rows_after_the_checkpoint_and_half_a_row_are_left_out(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path, 0)
    for step in (1, 2, 3):
        logger.log({"step": step, "loss": float(step)})
    logger.close()
    file = tmp_path / "metrics.csv"
    file.write_text(file.read_text() + "4,0.")
    CsvLogger(tmp_path, 2).close()
    assert [line.split(",")[0] for line in file.read_text().splitlines()] == ["step", "1", "2"]


@pytest.mark.parametrize(
    ("log", "module", "words"),
    [
        ({"tensorboard": True}, "torch.utils.tensorboard", "TensorBoard.*pip install tensorboard"),
        ({"wandb": "project"}, "wandb", "Weights & Biases.*pip install wandb"),
        ({"mlflow": "experiment"}, "mlflow", "MLflow.*pip install mlflow"),
    ],
)
def test_what_is_not_installed_is_told_before_the_first_step(
    log: dict[str, Any], module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loggers.importlib.import_module

    def missing(name: str) -> Any:
        if name == module:
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(loggers.importlib, "import_module", missing)
    with pytest.raises(InputError, match=words):
        train(config(tmp_path, 1, **log))


def test_a_logger_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def log(self, record: dict[str, Any]) -> None:
            raise ConnectionError("no route to host")

        def close(self) -> None:
            pass

    metrics = Metrics(tmp_path, loggers=[Failing()])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            metrics.write({"step": step})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    warnings = [record for record in caplog.messages if "no route to host" in record]
    assert len(warnings) == 1 and "training continues" in warnings[0]


@pytest.mark.parametrize("name", ["csv", "tensorboard", "wandb", "mlflow"])
def test_a_logger_that_does_not_start_does_not_end_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    if name == "csv":
        (tmp_path / "run" / "metrics.csv").mkdir(parents=True)
        why = "IsADirectoryError"
    else:
        service = SimpleNamespace(init=fail, SummaryWriter=fail, is_tracking_uri_set=fail)
        modules = {"tensorboard": "torch.utils.tensorboard"}
        monkeypatch.setitem(sys.modules, modules.get(name, name), service)
        why = "no route to host"
    assert train(config(tmp_path, 2, **{name: "runs" if name in ("wandb", "mlflow") else True}))
    warnings = [message for message in caplog.messages if f"log.{name} cannot be used" in message]
    assert len(warnings) == 1 and why in warnings[0] and "continues without it" in warnings[0]
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
    # Files of older versions have NaN.
    path.write_text(path.read_text().replace("null", "NaN", 1))
    Metrics(tmp_path, step=3).close()
    pytest.importorskip("matplotlib")
    assert draw_curves(path, tmp_path / "curves.svg")


def test_a_run_leaves_its_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train(config(tmp_path, 4))
    root = ElementTree.parse(tmp_path / "run" / CURVES).getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"loss", "tokens per second", "lr", "step"} <= set(texts)
    first = (tmp_path / "run" / CURVES).read_bytes()
    assert draw_curves(tmp_path / "run" / "metrics.jsonl", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == first
    (tmp_path / "one.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert not draw_curves(tmp_path / "one.jsonl", tmp_path / "none.svg")
