"""Where the metrics of a run go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow.

Each logger gets the numbers of every step, again for a step that a rollback repeats.
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
from fusedops.train.config import Config

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Logger:
    """Gets the numbers of each step; ``name`` is its key in the table ``log``."""

    name: str
    log: Callable[[dict[str, float], int], object]  # the numbers by name, and the step
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


def check_installed(config: Config) -> None:
    """Raise an ``InputError`` unless the packages that are asked for are installed."""
    log = config.log
    needed = [
        (f"log.{name}", module, name)
        for name, (module, _) in _SERVICES.items()
        if getattr(log, name)
    ]
    needed += [("config: export", "safetensors", "safetensors")] if config.export else []
    for key, module, package in needed:
        try:
            importlib.import_module(module)
        except ImportError:
            message = f"{key} needs the package {package}: pip install {package}"
            raise InputError(message) from None


def _tensorboard(module: Any, config: Config, step: int) -> Logger:
    """Write events into ``tensorboard/`` of the run, where those of later steps are purged."""
    writer = module.SummaryWriter(f"{config.out}/tensorboard", purge_step=step + 1)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

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
    return Logger("wandb", lambda numbers, step: run.log(numbers | {"step": step}), run.finish)


def _mlflow(module: Any, config: Config, step: int) -> Logger:
    """Log to MLflow where ``MLFLOW_TRACKING_URI`` says, else to ``mlflow.db`` of the run."""
    folder = Path(config.out)
    if not module.is_tracking_uri_set():
        module.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    module.set_experiment(config.log.mlflow)
    module.start_run(run_name=folder.name)
    settings = config_table.flat(asdict(config))
    module.log_params({name: str(value)[:500] for name, value in settings.items()})
    return Logger("mlflow", module.log_metrics, module.end_run)


# By the key in the table ``log``, which is the name of the package: the module, and the logger.
_SERVICES = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
}
