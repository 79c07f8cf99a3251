"""Where the metrics of a run go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow.

Each logger gets the line of every step. A step that is repeated after a rollback is logged again.
"""

from __future__ import annotations

import importlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusedops.launch import config_table
from fusedops.launch.config_table import InputError
from fusedops.train.config import Config, LogConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Logger:
    """Gets the line of each step; ``name`` is its key in the table ``log``."""

    name: str
    log: Callable[[dict[str, Any]], object]
    close: Callable[[], object] = lambda: None


def make_loggers(config: Config, step: int) -> list[Logger]:
    """Return the loggers that a configuration asks for; one that fails is left out, with a warning.

    Args:
        config: of the run.
        step: that the run resumes from.
    """
    loggers = []
    for name, (module, make) in _SERVICES.items():
        if not getattr(config.log, name):
            continue
        try:
            loggers.append(make(importlib.import_module(module), config, step))
        except Exception as error:  # a service that does not answer is no reason to stop
            why = f"{type(error).__name__}: {error}"
            _log.warning("log.%s cannot be used: %s; training continues without it", name, why)
    return loggers


def check_installed(log: LogConfig) -> None:
    """Raise an ``InputError`` unless the packages that are asked for are installed."""
    for name, (module, _) in _SERVICES.items():
        if getattr(log, name):
            try:
                importlib.import_module(module)
            except ImportError:
                message = f"log.{name} needs the package {name}: pip install {name}"
                raise InputError(message) from None


def _tensorboard(module: Any, config: Config, step: int) -> Logger:
    """Write events into ``tensorboard/`` of the run, where those of later steps are purged."""
    writer = module.SummaryWriter(f"{config.out}/tensorboard", purge_step=step + 1)

    def log(record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            writer.add_scalar(name, value, record["step"])

    return Logger("tensorboard", log, writer.close)


def _wandb(module: Any, config: Config, step: int) -> Logger:
    """Log to a run of Weights & Biases; ``WANDB_MODE=offline`` writes to ``wandb/`` of the run."""
    folder = Path(config.out)
    identity = folder / "wandb-id"  # names occur in several projects
    if not identity.exists():
        identity.write_text(uuid.uuid4().hex[:12])
    run = module.init(
        project=config.log.wandb,
        name=folder.name,
        id=identity.read_text().strip(),
        resume="allow",
        dir=config.out,
        config=config_table.flat(asdict(config)),
    )
    # Steps of its own would have to rise, also after a rollback.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return Logger(
        "wandb", lambda record: run.log(_numbers(record) | {"step": record["step"]}), run.finish
    )


def _mlflow(module: Any, config: Config, step: int) -> Logger:
    """Log to MLflow where ``MLFLOW_TRACKING_URI`` says, else to ``mlflow.db`` of the run."""
    folder = Path(config.out)
    if not module.is_tracking_uri_set():
        module.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    module.set_experiment(config.log.mlflow)
    module.start_run(run_name=folder.name)
    settings = config_table.flat(asdict(config))
    module.log_params({name: str(value)[:500] for name, value in settings.items()})
    return Logger(
        "mlflow",
        lambda record: module.log_metrics(_numbers(record), step=record["step"]),
        module.end_run,
    )


# By the key in the table ``log``, which is the name of the package: the module, and the logger.
_SERVICES = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
}


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return what of a step's line is a number, without the step."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
