"""A small training run, and several processes that do it together.

What is started in other processes must be functions of a module. Processes come from a fork server
that has imported everything: starting one takes a tenth of a second instead of three.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fusedops.testing.processes import PRELOADED
from fusedops.train import train
from fusedops.train.builder import Run

STEPS = 12
PATIENCE_SECONDS = 300.0

CONTEXT = multiprocessing.get_context("forkserver")
# There is one server for all tests, of whoever starts the first process. Not this file itself:
# until Python 3.13 the server does not know where tests lie, and says nothing of it.
_OURS = ("fusedops.cli.train", "fusedops.generation", "fusedops.train.loop")
CONTEXT.set_forkserver_preload([*PRELOADED, *_OURS, "psutil", "pytest", "torch._dynamo"])


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


def same_bits(one: Watching, other: Watching) -> bool:
    """Return whether two runs have come to the same weights and moments."""
    return all(map(torch.equal, one.state(), other.state()))


class Died(BaseException):
    """What a killed process does not get to."""


def die() -> None:
    """End a run as nothing in it expects."""
    raise Died


def digest(run: Run) -> str:
    """Return a digest of this rank's weights and moments."""
    found = hashlib.sha256()
    for parameter in run.parallel.model.parameters():
        states = run.optimizer.state[parameter]
        for each in (parameter, *(states[name] for name in sorted(states))):
            local: Any = each.to_local() if hasattr(each, "to_local") else each
            found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` on so many gloo ranks; return what each gave, or its error."""
    started = []
    with tempfile.TemporaryDirectory(prefix="fusedops-") as folder:
        for rank in range(ranks):
            mine, theirs = CONTEXT.Pipe()
            given = (theirs, rank, ranks, f"{folder}/store", function, args)
            process = CONTEXT.Process(target=_on_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        results = []
        for _, mine in started:
            try:
                results.append(mine.recv() if mine.poll(PATIENCE_SECONDS) else "no answer")
            except EOFError:
                results.append("died")
        for process, _ in started:
            process.kill()
            process.join()
    return results


def _on_rank(
    connection: Any, rank: int, ranks: int, store: str, function: Callable[..., Any], args: Any
) -> None:
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    try:
        connection.send(function(rank, *args))
    except Exception:
        connection.send(traceback.format_exc())
    dist.destroy_process_group()
