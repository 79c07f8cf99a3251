"""What a run tells while it goes, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fusedops.train.builder import Run


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        step: steps that were done.
        finished: whether those are all; ``False``: it was stopped, and goes on when started again.
        loss: of the last step; ``None``: there was none to do.
        validation_loss: the last one, or ``None``.
        folder: of the run.
    """

    step: int
    finished: bool
    loss: float | None
    validation_loss: float | None
    folder: Path


class Watcher(Protocol):
    """Is told how a run goes, on the first rank."""

    def begin(self, run: Run) -> None:
        """Before the first step; a ``ValueError`` here ends the run on all ranks."""
        ...

    def show(self, record: Mapping[str, Any]) -> None:
        """After each step, with its line of ``metrics.jsonl``."""
        ...
