"""What a person sees of a training run: its beginning, and a line of figures for some steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedops.train.builder import Run


def beginning(run: Run) -> list[str]:
    """Return lines that say what is trained, where, and from which step on."""
    count = sum(parameter.numel() for parameter in run.parallel.model.parameters())
    tokens = run.train.count * run.train.seq_len
    first = f"{count:,} parameters, {tokens:,} tokens, {run.ranks.description}: {run.config.out}"
    return [first, run.precision, *run.notes]


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


def is_shown(record: Mapping[str, Any], every: int, steps: int) -> bool:
    """Whether a step is one of those that get a line."""
    step = record["step"]
    return step % every == 0 or step == steps or "validation_loss" in record


class ProgressLines:
    """The callback of ``train`` without another one: lines on stderr, as ``log.every`` says."""

    def begin(self, run: Run) -> None:
        """Print what is trained."""
        self._every, self._steps = run.config.log.every, run.config.steps
        for line in beginning(run):
            print(line, file=sys.stderr, flush=True)

    def show(self, record: Mapping[str, Any]) -> None:
        """Print the figures of a step."""
        if is_shown(record, self._every, self._steps):
            text = f"step {record['step']}/{self._steps}  {figures(record)}"
            print(text, file=sys.stderr, flush=True)
