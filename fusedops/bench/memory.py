"""One model's step of training under several memory policies: what it holds, and what it takes.

All variants are copies of one patched model, are interleaved in one process, and must give the same
loss and gradients to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fusedops
from fusedops import memory
from fusedops.bench.model_zoo import ModelFamily, ModelSize
from fusedops.bench.results import dtype_name
from fusedops.memory.layers import lists_of
from fusedops.memory.measurement.report import MemoryReport
from fusedops.runtime.timer import Clock, TimingPlan, Variant, measure

PLAIN = "plain"
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


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
    clock: Clock,
    plan: TimingPlan,
    report: Callable[[str], None],
) -> tuple[list[MemoryRow], dict[str, MemoryReport]]:
    """Measure one model; return a row per policy, and the reports for a picture."""
    model = family.build(size).to(device, dtype).train()
    fusedops.patch(model)
    batch = family.batch(size, device, dtype, labels=True)
    chosen = policies(list(lists_of(model)))
    models: dict[str, nn.Module] = {}
    reports: dict[str, MemoryReport] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for name, policy in chosen.items():
        report(f"{name}: bytes")
        models[name] = copy.deepcopy(model)
        memory.apply(models[name], policy)
        reports[name] = memory.report(models[name], batch)
        results[name] = _results(models[name], batch)
    report("timing")
    variants = [Variant(name, partial(_step, model, batch)) for name, model in models.items()]
    timing = measure(variants, clock, plan)
    rows = []
    for name in chosen:
        spread, ratio = timing.spread(name), timing.ratio(name, PLAIN)
        same = all(torch.equal(a, b) for a, b in zip(results[name], results[PLAIN], strict=True))
        rows.append(
            MemoryRow(
                family.name,
                size.label,
                dtype_name(dtype),
                name,
                reports[name].activations,
                reports[name].dynamic,
                spread.median * 1e3,
                spread.q1 * 1e3,
                spread.q3 * 1e3,
                ratio.median,
                ratio.q1,
                ratio.q3,
                timing.trusted(name),
                same,
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
    gradients = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad(set_to_none=True)
    return [loss, *gradients]
