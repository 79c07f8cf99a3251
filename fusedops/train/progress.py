"""What a caller gets of a training run, and what a person sees: its beginning, and some figures."""

from __future__ import annotations

import sys
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


def figures(record: Mapping[str, Any]) -> str:
    """Return the figures of a step in a line."""
    text = (
        f"loss {record['loss']:.4f}  norm {record['grad_norm']:.2f}  "
        f"lr {record['lr']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"MFU {record['mfu']:.1%}"
    )
    if record["action"] != "go":
        text += f"  not taken: {record['action']}"
    if "validation_loss" in record:
        text += f"  validation {record['validation_loss']:.4f}"
    return text


class ProgressLines:
    """The callback of ``train`` without another one: lines on stderr, as ``log.every`` says."""

    def begin(self, run: Run) -> None:
        """Print what is trained, where, and from which step on."""
        self._every, self._steps = run.config.log.every, run.config.steps
        count = sum(parameter.numel() for parameter in run.parallel.model.parameters())
        size = f"{count:,} parameters, {run.train.count * run.train.seq_len:,} tokens"
        first = f"{size}, {run.ranks.description}: {run.config.out}"
        for line in (first, run.precision, *run.notes):
            print(line, file=sys.stderr, flush=True)

    def show(self, record: Mapping[str, Any]) -> None:
        """Print the figures of a step that gets a line."""
        step = record["step"]
        if step % self._every == 0 or step == self._steps or "validation_loss" in record:
            text = f"step {step}/{self._steps}  {figures(record)}"
            print(text, file=sys.stderr, flush=True)
