"""Where the metrics of a run go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow.

Each logger gets the line of every step. A step that is repeated after a rollback is logged again.
"""

from __future__ import annotations

import csv
import importlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from fusedops.launch.config_table import InputError
from fusedops.train.config import Config, LogConfig

_log = logging.getLogger(__name__)

# Columns of metrics.csv, in the order of a step's line.
COLUMNS = (
    *("step", "loss", "validation_loss", "router_loss", "grad_norm", "lr", "action", "seconds"),
    *("tokens_per_second", "mfu", "communication", "memory_bytes"),
)


class Logger(Protocol):
    """Gets the line of each step."""

    def log(self, record: dict[str, Any]) -> None:
        """Log a step; ``record["step"]`` is its number."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def make_loggers(config: Config, step: int) -> list[Logger]:
    """Return the loggers that a configuration asks for; one that fails is left out, with a warning.

    Args:
        config: of the run.
        step: that the run resumes from.

    Raises:
        InputError: the package of one is not installed.
    """
    check_installed(config.log)
    folder, log = Path(config.out), config.log
    settings = {
        f"{table}.{name}": value
        for table, values in asdict(config).items()
        for name, value in (values.items() if isinstance(values, dict) else ())
    }
    makers: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CsvLogger(folder, step),
        "tensorboard": lambda: TensorBoardLogger(folder, step),
        "wandb": lambda: WandbLogger(folder, log.wandb, settings),
        "mlflow": lambda: MLflowLogger(folder, log.mlflow, settings),
    }
    made: list[Logger] = []
    for name, make in makers.items():
        if not getattr(log, name):
            continue
        try:
            made.append(make())
        except Exception as error:  # a service that does not answer is no reason to stop
            why = f"{type(error).__name__}: {error}"
            _log.warning("log.%s cannot be used: %s; training continues without it", name, why)
    return made


def check_installed(log: LogConfig) -> None:
    """Raise an ``InputError`` unless the packages that are asked for are installed."""
    if log.tensorboard:
        _needed("torch.utils.tensorboard", "tensorboard", "log.tensorboard needs TensorBoard")
    if log.wandb:
        _needed("wandb", "wandb", "log.wandb needs Weights & Biases")
    if log.mlflow:
        _needed("mlflow", "mlflow", "log.mlflow needs MLflow")


class TensorBoardLogger:
    """Events for TensorBoard, in ``tensorboard/`` of the run; those of later steps are purged."""

    def __init__(self, folder: Path, step: int) -> None:
        writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, record: dict[str, Any]) -> None:
        """Log a step."""
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` writes to ``wandb/`` of the run's folder.

    Args:
        folder: of the run; its name is that of the run.
        project: of Weights & Biases.
        settings: the configuration of the run, which is shown there.
    """

    def __init__(self, folder: Path, project: str, settings: dict[str, Any]) -> None:
        wandb = _needed("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=_identity(folder),
            resume="allow",
            dir=str(folder),
            config=settings,
        )
        # Steps of its own would have to rise, also after a rollback.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: dict[str, Any]) -> None:
        """Log a step."""
        self._run.log({**numbers(record), "step": record["step"]})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _identity(folder: Path) -> str:
    """Return the identity of a run, which its folder keeps: names occur in several projects."""
    file = folder / "wandb-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


class MLflowLogger:
    """A run of MLflow; ``MLFLOW_TRACKING_URI`` says where, ``mlflow.db`` of the folder by default.

    Args:
        folder: of the run; its name is that of the run.
        experiment: of MLflow.
        settings: the configuration of the run, which is shown there.
    """

    def __init__(self, folder: Path, experiment: str, settings: dict[str, Any]) -> None:
        self._mlflow = _needed("mlflow", "mlflow")
        if not self._mlflow.is_tracking_uri_set():
            self._mlflow.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, record: dict[str, Any]) -> None:
        """Log a step."""
        self._mlflow.log_metrics(numbers(record), step=record["step"])

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class CsvLogger:
    """``metrics.csv`` with a row for each step."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / "metrics.csv"
        rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if _is_done(row, step)]
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._writer.writeheader()
        self._writer.writerows(rows)

    def log(self, record: dict[str, Any]) -> None:
        """Write the row of a step."""
        self._writer.writerow(record)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_done(row: dict[str, str], step: int) -> bool:
    """Whether a row is that of a step up to this one; a damaged one is none."""
    word = row.get("step") or ""
    return word.isdecimal() and int(word) <= step and None not in row.values()


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return what of a step's line is a number, without the step."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _needed(module: str, package: str, why: str = "the log needs a package") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{why}, which is not installed: pip install {package}") from None
