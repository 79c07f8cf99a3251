"""What the ops that add to a residual stream say alike: checks, dtypes, when dropout is active."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, philox

_HALF = (torch.bfloat16, torch.float16)


def check(op: str, input: Any, residual: Any, argument: str, p: Any) -> None:
    """Raise unless ``input`` can be added to ``residual``, dropped with probability ``p``."""
    checks.tensor(op, "input", input)
    checks.like(op, "residual", residual, "input", input)
    checks.shape(op, "residual", residual, input.shape, "the shape of input")
    checks.probability(op, argument, p)


def promote(
    input: torch.Tensor, residual: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the dtypes that kernels take for a sum of ``dtype``.

    That is ``dtype``, except that a half-precision ``input`` beside a float32 sum stays: a linear's
    output on its way into a float32 stream under autocast. Kernels read it without a copy.
    """
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALF):
        input = input.to(dtype)
    return input, residual if residual.dtype == dtype else residual.to(dtype)


def draw_seed(input: torch.Tensor, p: float, training: bool) -> tuple[torch.Tensor | None, float]:
    """Return the seed and the probability that the op receives: ``(None, 0.0)`` without dropout."""
    if not training or p == 0.0:
        return None, 0.0
    return philox.new_seed(input.device), float(p)
