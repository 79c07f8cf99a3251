"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from fusedops.train.config import ScheduleConfig

_DECAY_SHARE = 10


def learning_rate(step: int, steps: int, lr: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of a step.

    With ``w`` steps of warmup, step ``s < w`` has ``lr * (s + 1) / w``. After it, with ``x`` from 0
    at the first step to 1 at the last and ``f = schedule.final``:

    | kind | |
    |---|---|
    | ``"constant"`` | ``lr`` |
    | ``"linear"`` | ``lr * (1 - (1 - f) * x)`` |
    | ``"cosine"`` | ``lr * (f + (1 - f) * (1 + cos(pi * x)) / 2)`` |
    | ``"stable-decay"`` | ``lr``, and over the last ``schedule.decay`` steps as ``"linear"`` |

    Args:
        step: from 0.
        steps: of the run.
        lr: the largest.
        schedule: the rest.
    """
    if step < schedule.warmup:
        return lr * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return lr
    first = schedule.warmup
    if schedule.kind == "stable-decay":
        first = max(first, steps - (schedule.decay or max(1, steps // _DECAY_SHARE)))
    x = min(1.0, max(0.0, (step - first) / max(1, steps - 1 - first)))
    fall = (1 + math.cos(math.pi * x)) / 2 if schedule.kind == "cosine" else 1 - x
    return lr * (schedule.final + (1 - schedule.final) * fall)
