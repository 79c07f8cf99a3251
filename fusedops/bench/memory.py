"""Steps of training of one model: under several memory policies, and with and without an arena.

Variants are copies of one model and are interleaved. Policies must give the same loss and gradients
to the bit. An arena is measured with the system's allocator untuned: each fresh process trains both
copies, which must have the same losses and weights; the result is the median of the processes.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fusedops
from fusedops import memory
from fusedops.bench.model_zoo import FAMILIES, ModelFamily, ModelSize
from fusedops.bench.results import dtype_name
from fusedops.memory.arena import StepArena
from fusedops.memory.arena.usage import ArenaReport
from fusedops.memory.layers import lists_of
from fusedops.memory.measurement.report import MemoryReport
from fusedops.optim import AdamW
from fusedops.runtime import host
from fusedops.runtime.timer import TimingPlan, Variant, clock_for, measure

PLAIN = "plain"
_ARENA = "arena"
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
_WARM_UP = 5  # steps in an arena: its plan is final after three


def policies(names: list[str]) -> dict[str, memory.Policy]:
    """Return what is compared, by name, for layers of these names."""
    recompute, offload = memory.recompute(names), memory.offload(names)
    return {
        PLAIN: memory.Policy(),
        "recompute norms": memory.Policy(memory.recompute(ops=list(_NORMS))),
        "recompute, keep attention": memory.Policy(recompute, memory.save(ops="attention")),
        "recompute": memory.Policy(recompute),
        "offload": memory.Policy(offload),
        "recompute, offload inputs": memory.Policy(recompute, offload),
    }


@dataclass(frozen=True)
class MemoryRow:
    """One policy on one model."""

    family: str  # of the model
    case: str  # its size
    dtype: str  # of the weights
    policy: str  # as ``policies`` names it
    activations: int  # bytes that the forward leaves for the backward, on the device
    peak: int  # bytes of a step above weights and states
    median_ms: float  # time of forward and backward
    q1_ms: float  # lower quartile
    q3_ms: float  # upper quartile
    overhead: float  # that time as a multiple of the plain step's, median of the rounds' ratios
    overhead_q1: float  # lower quartile of those ratios
    overhead_q3: float  # upper quartile
    trusted: bool  # whether enough samples were undisturbed
    same_bits: bool  # whether loss and gradients are those of the plain step


def run_case(
    family: ModelFamily,
    size: ModelSize,
    dtype: torch.dtype,
    device: torch.device,
    plan: TimingPlan,
    report: Callable[[str], None],
) -> tuple[list[MemoryRow], dict[str, MemoryReport]]:
    """Measure one model; return a row per policy, and the reports for a picture."""
    model = family.build(size).to(device, dtype).train()
    fusedops.patch(model)
    batch = family.batch(size, device, dtype, labels=True)
    models: dict[str, nn.Module] = {}
    reports: dict[str, MemoryReport] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for name, policy in policies(list(lists_of(model))).items():
        report(f"{name}: bytes")
        models[name] = copy.deepcopy(model)
        memory.apply(models[name], policy)
        reports[name] = memory.report(models[name], batch)
        results[name] = _results(models[name], batch)
    report("timing")
    variants = [Variant(name, partial(_step, model, batch)) for name, model in models.items()]
    timing = measure(variants, clock_for(device), plan)
    rows = []
    for name in models:
        spread, ratio = timing.spread(name), timing.ratio(name, PLAIN)
        rows.append(
            MemoryRow(
                *(family.name, size.label, dtype_name(dtype), name),
                *(reports[name].activations, reports[name].dynamic),
                *(1e3 * spread.median, 1e3 * spread.q1, 1e3 * spread.q3),
                *(ratio.median, ratio.q1, ratio.q3),
                timing.trusted(name),
                all(map(torch.equal, results[name], results[PLAIN])),
            )
        )
    return rows, reports


def _step(model: nn.Module, batch: Any, _: object = None) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def _results(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the loss and the gradients of a step."""
    torch.manual_seed(0)
    loss = _step(model, batch)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss, *grads]


@dataclass(frozen=True)
class ArenaStepSettings:
    """Which step is measured in an arena."""

    family: str  # of the model
    size: ModelSize  # of the model
    dtype: torch.dtype  # of the weights
    seconds: float  # of one process
    threads: int  # of one process; 0: one per physical core
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


def arena_steps(settings: ArenaStepSettings) -> list[ArenaStepRow]:
    """Return a row per process."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for _ in range(settings.processes):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            rows.append(pool.submit(_arena_step, settings).result())
    return rows


def _arena_step(settings: ArenaStepSettings) -> ArenaStepRow:
    torch.set_num_threads(settings.threads or host.physical_cores())
    device = torch.device("cpu")
    family = FAMILIES[settings.family]
    model = family.build(settings.size).to(settings.dtype).train()
    if settings.patched:
        fusedops.patch(model)
    batch = family.batch(settings.size, device, settings.dtype, labels=True)
    models = {PLAIN: model, _ARENA: copy.deepcopy(model)}
    arena = memory.use_arena(models[_ARENA])
    arenas = {PLAIN: None, _ARENA: arena}
    steps = {name: _training_step(one, batch, arenas[name]) for name, one in models.items()}
    losses = [[step() for _ in range(_WARM_UP)] for step in steps.values()]
    weights = (one.parameters() for one in models.values())
    same_bits = all(map(torch.equal, *losses)) and all(map(torch.equal, *weights))
    variants = [Variant(name, step) for name, step in steps.items()]
    timing = measure(variants, clock_for(device), TimingPlan(seconds=settings.seconds))
    ratio = timing.ratio(PLAIN, _ARENA)
    return ArenaStepRow(
        1e3 * timing.spread(PLAIN).median,
        1e3 * timing.spread(_ARENA).median,
        *(ratio.median, ratio.q1, ratio.q3),
        all(timing.trusted(name) for name in steps),
        same_bits,
        arena.report(),
    )


def _training_step(
    model: nn.Module, batch: Any, arena: StepArena | None = None
) -> Callable[..., torch.Tensor]:
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def step(_: object = None) -> torch.Tensor:
        with contextlib.nullcontext() if arena is None else arena.step():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    return step
