"""What is computed and kept in which dtype, and the factor of the loss under float16."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch

from fusedops.train.config import AUTO, LEAST_LOSS_SCALE, PrecisionConfig


def resolve(
    precision: PrecisionConfig, device: torch.device, *, wide: bool = False
) -> tuple[PrecisionConfig, str]:
    """Return the precision of a run without ``"auto"``, and a line that says what it is and why.

    ``wide``: the layout needs float32 weights.
    """
    param, compute, reason = precision.param, precision.compute, "set in [precision]"
    if param == AUTO and compute != AUTO:
        param = "float32"
    elif param == AUTO:
        param, where = "float32", "the default on the CPU"
        if wide:
            where = "parallel.ep_deterministic needs them"
        elif device.type == "cuda" and torch.cuda.is_bf16_supported(False):
            param, where = "bfloat16", "the default on a GPU"
        elif device.type == "cuda":
            where = "the GPU does not compute in bfloat16"
        reason = f"{where}; set precision.param for another"
    compute = param if compute == AUTO else compute
    words = f"{param} weights"
    if compute != param:
        words += f" under {compute} autocast"
    elif param != "float32":
        words += " with float32 masters"
    resolved = replace(precision, param=param, compute=compute)
    return resolved, f"precision: {words}, gradients in {precision.reduce} ({reason})"


def computing(
    precision: PrecisionConfig, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the forward: autocast where weights are wider than the products."""
    if precision.compute == precision.param:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision.compute))


class LossScale:
    """A factor of the loss that keeps float16 gradients in range; 1 for all other dtypes.

    A power of two, so that it changes no other bit. It halves where a gradient is not finite, which
    skips the step, and doubles after ``growth`` steps without. The norm of all gradients tells: it
    is the same number on all ranks, so all of them skip. What is not finite under the least factor
    is no overflow: it is left to the guard, which does not skip for ever.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self.active = precision.compute == "float16"
        self.value = precision.loss_scale if self.active else 1.0
        self._growth = precision.growth
        self._good = 0

    def overflowed(self, grad_norm: float) -> bool:
        """Return whether the step must be skipped; take account of it either way."""
        if not self.active:
            return False
        if math.isfinite(grad_norm):
            self._good += 1
            if self._good == self._growth:
                self.value, self._good = self.value * 2, 0
            return False
        before, self._good = self.value, 0
        self.value = max(LEAST_LOSS_SCALE, before / 2)
        return self.value < before

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the good steps since it changed."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave, where there is a factor."""
        if self.active:
            self.value, self._good = state["value"], state["good"]
