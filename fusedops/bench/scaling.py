"""What two processes of one thread reach of one process of two: ``fusedops bench scaling``.

A training step (forward, backward, clipping, AdamW) of one model in several settings, each in
processes of its own that stay. The settings are interleaved: while one makes its steps the
processes of the others wait, and each is compared with the first one round by round, so that what
disturbs the machine disturbs all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops.bench.small_models import (
    InterleavedRow,
    SmallModel,
    shape_of_step,
    text_of,
    training_step,
)
from fusedops.bench.teams import TeamSetting, interleaved
from fusedops.models import ParallelConfig, TransformerConfig
from fusedops.optim import AdamW
from fusedops.planner import Device, step_time


@dataclass(frozen=True)
class ScalingSetting:
    """A way of training the same model."""

    name: str  # as the table shows it
    processes: int  # how many
    threads: int  # of each
    # sizes and options of ``ParallelConfig``; ``None``: the patched model of transformers
    parallel: dict[str, Any] | None


_PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": 8}
SETTINGS = {
    entry.name: entry
    for entry in (
        ScalingSetting("one process", 1, 2, {}),
        ScalingSetting("one process, 8 parts", 1, 2, {"microbatches": 8}),
        ScalingSetting("patched transformers", 1, 2, None),
        ScalingSetting("dp 2", 2, 1, {"dp": 2}),
        ScalingSetting("dp 2, zero 1", 2, 1, {"dp": 2, "zero": 1}),
        ScalingSetting("tp 2", 2, 1, {"tp": 2}),
        ScalingSetting("tp 2, overlap_microbatches", 2, 1, {"tp": 2, "overlap_microbatches": True}),
        ScalingSetting("tp 2, sp", 2, 1, {"tp": 2, "sp": True}),
        ScalingSetting("cp 2", 2, 1, {"cp": 2}),
        ScalingSetting("pp 2", 2, 1, _PIPELINE),
        ScalingSetting("pp 2, zero_bubble", 2, 1, _PIPELINE | {"pipeline_schedule": "zero_bubble"}),
        ScalingSetting("pp 2, zbv", 2, 1, _PIPELINE | {"pipeline_schedule": "zbv"}),
    )
}
FIRST = "one process"


@dataclass(frozen=True)
class ScalingWork(SmallModel):
    """What is trained."""

    sequences: int  # of a step, on all processes together
    tokens: int  # of a sequence


@dataclass(kw_only=True)
class ScalingRow(InterleavedRow):
    """What a setting reached; a turn is a step."""

    setting: ScalingSetting  # which
    loss: float = 0.0  # of the first step


def measure(
    work: ScalingWork, names: Sequence[str], seconds: float, report: Callable[[str], None] = print
) -> list[ScalingRow]:
    """Measure interleaved settings, for about so many seconds each; return a row for each.

    ``names`` are of ``SETTINGS``; the first one measured is ``FIRST``. ``report`` is called with
    what is being done.

    Raises:
        RuntimeError: a process failed; with what it said.
    """
    chosen = [SETTINGS[name] for name in dict.fromkeys((FIRST, *names))]
    tokens = work.sequences * work.tokens
    rows = [ScalingRow(setting=setting, tokens=tokens) for setting in chosen]
    teams = [
        TeamSetting(own.name, own.processes, own.threads, partial(_step_of, own, work))
        for own in chosen
    ]
    measured = interleaved(teams, seconds, report)
    for row, (times, loss) in zip(rows, measured, strict=True):
        row.seconds, row.loss = times, loss
        row.ratios = [one / own for one, own in zip(measured[0][0], times, strict=True)]
    return rows


def predicted(
    work: ScalingWork, setting: ScalingSetting, devices: Sequence[Device]
) -> float | None:
    """Return the seconds of a setting's step by the planner, ``None`` for a patched model.

    ``devices`` are processes of one thread, and of two (``fusedops bench device --threads``);
    without one of the setting's threads, the first one's products are scaled by their number.
    """
    if setting.parallel is None:
        return None
    parallel = ParallelConfig(**setting.parallel)
    own = next((device for device in devices if device.threads == setting.threads), None)
    if own is None:
        own = devices[0]
        factor = setting.threads / max(1, own.threads)
        own = replace(own, peak={name: factor * rate for name, rate in own.peak.items()})
    shape = shape_of_step(work.config(work.tokens), parallel, work.sequences)
    return step_time(shape, own).seconds


def _step_of(setting: ScalingSetting, work: ScalingWork) -> Callable[[], float]:
    """Return a function that makes a step and returns its loss."""
    config = work.config(work.tokens)
    if setting.parallel is not None:
        return training_step(config, ParallelConfig(**setting.parallel), work.sequences)
    return _patched_step(config, *text_of(config, work.sequences))


def _patched_step(
    config: TransformerConfig, tokens: torch.Tensor, labels: torch.Tensor
) -> Callable[[], float]:
    """Return a step of the model of transformers with this architecture, patched."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fusedops.integrations import patch
    from fusedops.models import to_config

    values = to_config(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(made)
    patch(model)
    model.train()
    optimizer = AdamW(model.parameters(), lr=1e-4, max_norm=1.0)

    def step() -> float:
        loss = model(input_ids=tokens, shift_labels=labels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
