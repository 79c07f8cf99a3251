"""A small training run that draws from every generator, alone and on several ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from one_process import full_tensor
from run_ranks import on_fresh_ranks
from torch import nn

import fusedops
from fusedops.checkpoint import Checkpointer, Guard
from fusedops.checkpoint import folder as folders
from fusedops.runtime import generators

WIDTH = 64


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Let the random generators go on as if nothing had been drawn."""
    states = generators.capture()
    yield
    generators.restore(states)


class Net(nn.Module):
    """Two layers with dropout of torch's and of the fused ops."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.first(x)), 0.2, self.training)
        self.seen += x.shape[0]
        return fusedops.bias_dropout_add(self.second(hidden), None, x, 0.3, self.training)


class Run:
    """A model, its optimizer, a scheduler and a guard, with a checkpointer around them."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 3,
        width: int = WIDTH,
        wrap: Callable[[nn.Module], object] = lambda model: model,
    ) -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        self.model = Net(width)
        wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.guard = Guard()
        self.losses: list[float] = []
        self.checkpointer = Checkpointer(
            root, self.model, self.optimizer, keep=keep, scheduler=self.scheduler, guard=self.guard
        )

    def step(self, number: int) -> None:
        """Do a step; its data depend on its number and on Python's and NumPy's generators."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(8, self.model.first.in_features, generator=generator)
        batch = batch + random.random() + float(numpy.random.rand())
        loss = self.model(batch).square().mean()
        loss.backward()
        assert self.guard.check(number, loss).ok
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def train(self, steps: int, *, every: int = 1, block: bool = True) -> str:
        """Go on from the last checkpoint to ``steps``; return a digest of all that there is."""
        restored = self.checkpointer.load()
        start = restored.step if restored else 0
        assert restored is None or restored.data == {"position": start * 8}
        for number in range(start, steps):
            self.step(number)
            if (number + 1) % every == 0:
                data = {"position": (number + 1) * 8}
                self.checkpointer.save(number + 1, data=data, block=block)
        self.checkpointer.close()
        return self.digest()

    def digest(self) -> str:
        """Return a digest of weights, buffers, optimizer states and the next random numbers."""
        found = hashlib.sha256()
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += state.values()
        with undrawn():
            drawn = [torch.rand(4), torch.tensor([random.random(), float(numpy.random.rand())])]
        for tensor in [*tensors, *drawn]:
            found.update(full_tensor(tensor).contiguous().numpy().tobytes())
        return found.hexdigest()


def train(connection: Any, root: str, steps: int, block: bool) -> None:
    """Train in another process; tell when it begins, and what came out."""
    torch.set_num_threads(1)
    run = Run(Path(root))
    connection.send("begins")
    connection.send(run.train(steps, block=block))


@functools.cache
def uninterrupted(steps: int) -> str:
    """Return what a run without a checkpoint ends with."""
    with undrawn(), tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        for number in range(steps):
            run.step(number)
        return run.digest()


def steps_in(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, the newest first."""
    return [folders.step_of(checkpoint) for checkpoint in folders.checkpoints(root)]


on_ranks = partial(on_fresh_ranks, patience=60.0, timeout=30.0)
