"""A small training run, which tests also start on several ranks (``run_ranks.py``)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fusedops.train import loop, train
from fusedops.train.builder import Run

STEPS = 12


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration that trains in a second or two."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{n} plus {n} is {2 * n}.\n" for n in range(400)))
    return {
        "out": str(folder / "run"),
        "steps": STEPS,
        "batch": 4,
        "device": "cpu",
        "tune_host": False,
        "model": {"preset": "tiny-gpt2", "dropout": 0.1, "attention_dropout": 0.1},
        "data": {"train": [str(text)], "seq_len": 32},
        "optimizer": {"lr": 1e-2},
        "log": {"peak_tflops": 1.0},
        "checkpoint": {"every": 5},
        "validation": {"every": 6, "sequences": 6},
    } | changes


class Watching:
    """Keeps what a run tells, and interrupts it after a step."""

    def __init__(self, at: int = -1, interrupt: Callable[[], object] = lambda: None) -> None:
        self.records: list[Mapping[str, Any]] = []
        self._at, self._interrupt = at, interrupt

    def begin(self, run: Run) -> None:
        self.run, self.first = run, run.step

    def show(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        if record["step"] == self._at:
            self._interrupt()

    def state(self) -> list[torch.Tensor]:
        """Return weights and moments."""
        model, states = self.run.parallel.model, self.run.optimizer.state
        found = [*model.state_dict().values()]
        for parameter in model.parameters():
            found += [each for _, each in sorted(states[parameter].items())]
        return found


def whole(folder: Path, **changes: Any) -> Watching:
    """Return an uninterrupted run on one process."""
    watching = Watching()
    out = str(folder / "whole")
    assert train(config(folder, out=out, **changes), callback=watching).finished
    return watching


@functools.cache
def uninterrupted() -> Watching:
    """Return an uninterrupted run of ``config`` as it is."""
    with tempfile.TemporaryDirectory() as folder:
        return whole(Path(folder))


def died(folder: Path, at: int, given: Mapping[str, Any] | None = None) -> Watching:
    """Run until the process would be killed behind a step."""
    watching = Watching(at, die)
    with pytest.raises(Died):
        train(config(folder) if given is None else given, callback=watching)
    return watching


def resumed(given: Mapping[str, Any], *more: str) -> Watching:
    """Run to the end from where an earlier run with the same folder had come to."""
    watching = Watching()
    assert train(given, list(more), callback=watching).finished
    return watching


def lines(folder: Path, name: str = "run") -> list[dict[str, Any]]:
    """Return the metrics that a run has written."""
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]


def same_bits(one: Watching, other: Watching) -> bool:
    """Return whether two runs have come to the same weights and moments."""
    return all(map(torch.equal, one.state(), other.state()))


class Died(BaseException):
    """What a killed process does not get to."""


def die() -> None:
    """End a run as nothing in it expects."""
    raise Died


@contextlib.contextmanager
def around_backward(
    before: Callable[[Run], None] = lambda run: None,
    after: Callable[[Run], None] = lambda run: None,
) -> Iterator[list[Run]]:
    """Do something before or after each backward; give the run, once for each."""
    plain, runs = loop.backward, []

    def backward(run: Run) -> torch.Tensor:
        runs.append(run)
        before(run)
        losses = plain(run)
        after(run)
        return losses

    with mock.patch.object(loop, "backward", backward):
        yield runs


def digest(run: Run) -> str:
    """Return a digest of this rank's weights and moments."""
    found = hashlib.sha256()
    for parameter in run.parallel.model.parameters():
        states = run.optimizer.state[parameter]
        for each in (parameter, *(states[name] for name in sorted(states))):
            local: Any = each.to_local() if hasattr(each, "to_local") else each
            found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
