"""A training step on the CPU with and without an arena, with the system's allocator untuned.

Each fresh process trains two copies of one model, one of them in an arena, whose steps are
interleaved; the row is the median of the processes.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fusedops
from fusedops import memory
from fusedops.bench.model_zoo import FAMILIES, ModelSize
from fusedops.memory.arena import StepArena
from fusedops.memory.arena.usage import ArenaReport
from fusedops.optim import AdamW
from fusedops.runtime import host
from fusedops.runtime.timer import TimingPlan, Variant, clock_for, measure

_WARM_UP = 5  # steps: the plan is final after three
_PLAIN, _ARENA = "plain", "arena"


@dataclass(frozen=True)
class ArenaStepSettings:
    """What is measured."""

    family: str  # of the model
    size: ModelSize  # of it
    dtype: torch.dtype  # of the weights
    seconds: float  # of one process
    threads: int  # of it; 0: one per physical core
    processes: int  # how many, one after another
    patched: bool = False  # whether ``fusedops.patch`` fuses the model: fewer temporaries


@dataclass(frozen=True)
class ArenaStepRow:
    """One process."""

    plain_ms: float  # median of the step without an arena
    arena_ms: float  # of the step in one
    speedup: float  # plain by arena, median of the rounds' ratios
    speedup_q1: float  # lower quartile of these
    speedup_q3: float  # upper quartile
    trusted: bool  # whether enough samples were undisturbed
    same_bits: bool  # whether losses and weights of both are equal after all steps
    report: ArenaReport  # of the arena


def run(settings: ArenaStepSettings) -> list[ArenaStepRow]:
    """Return a row per process."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for _ in range(settings.processes):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            rows.append(pool.submit(_measure, settings).result())
    return rows


@dataclass
class _Trained:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Any]
    arena: StepArena | None = None

    def step(self, _: object = None) -> torch.Tensor:
        with contextlib.nullcontext() if self.arena is None else self.arena.step():
            loss = self.model(**self.batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()


def _measure(settings: ArenaStepSettings) -> ArenaStepRow:
    torch.set_num_threads(settings.threads or host.physical_cores())
    device = torch.device("cpu")
    family = FAMILIES[settings.family]
    model = family.build(settings.size).to(settings.dtype).train()
    if settings.patched:
        fusedops.patch(model)
    batch = family.batch(settings.size, device, settings.dtype, labels=True)
    trained = {}
    for name in (_PLAIN, _ARENA):
        same = copy.deepcopy(model)
        arena = memory.use_arena(same) if name == _ARENA else None
        trained[name] = _Trained(same, AdamW(same.parameters(), lr=1e-4), batch, arena)
    losses = [[one.step() for _ in range(_WARM_UP)] for one in trained.values()]
    same_bits = all(map(torch.equal, *losses)) and all(
        map(torch.equal, *(one.model.parameters() for one in trained.values()))
    )
    variants = [Variant(name, partial(one.step)) for name, one in trained.items()]
    timing = measure(variants, clock_for(device), TimingPlan(seconds=settings.seconds))
    ratio = timing.ratio(_PLAIN, _ARENA)
    using = trained[_ARENA].arena
    assert using is not None
    return ArenaStepRow(
        timing.spread(_PLAIN).median * 1e3,
        timing.spread(_ARENA).median * 1e3,
        ratio.median,
        ratio.q1,
        ratio.q3,
        all(timing.trusted(name) for name in trained),
        same_bits,
        using.report(),
    )
