"""The result of a training run, and the callback that is called while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fusedops.train.builder import Run


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        step: steps that were done.
        finished: whether those are all; ``False``: it was stopped, and continues when restarted.
        loss: of the last step; ``None``: there was none to do.
        validation_loss: the last one, or ``None``.
        folder: of the run.
    """

    step: int
    finished: bool
    loss: float | None
    validation_loss: float | None
    folder: Path


class ProgressCallback(Protocol):
    """Is called while a run trains, on the first rank."""

    def begin(self, run: Run) -> None:
        """Before the first step; a ``ValueError`` here ends the run on all ranks."""
        ...

    def show(self, record: Mapping[str, Any]) -> None:
        """After each step, with its line of ``metrics.jsonl``."""
        ...
