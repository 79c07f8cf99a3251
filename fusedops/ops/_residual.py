"""Shared checks, dtypes and dropout of the ops that add to a residual stream."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes, philox

_HALF = (torch.bfloat16, torch.float16)


def check(op: str, input: Any, residual: Any, argument: str, p: Any, training: Any) -> torch.dtype:
    """Raise unless ``input`` can be added to ``residual``, dropped with probability ``p``.

    Returns the dtype of the sum.
    """
    checks.tensor(op, "input", input)
    if not checks.alike(residual, input.dtype, input.device):
        checks.like(op, "residual", residual, "input", input)
    if residual.shape != input.shape:
        checks.shape(op, "residual", residual, input.shape, "the shape of input")
    checks.probability(op, argument, p)
    checks.flag(op, "training", training)
    if residual.dtype == input.dtype:
        return input.dtype
    return torch.promote_types(residual.dtype, input.dtype)


def is_plain(
    input: Any, residual: Any, normalized_shape: Any, p: Any, training: Any, seed: Any
) -> bool:
    """Whether the op can be called directly: one size and dtype, no dropout, no GPU autocast.

    The op's contract checks everything else. Checks here took a third of a call of 16 rows.
    """
    return (
        type(p) is float
        and p == 0.0
        and type(normalized_shape) is tuple
        and len(normalized_shape) == 1
        and type(normalized_shape[0]) is int
        and (training is True or training is False)
        and seed is None
        and isinstance(input, torch.Tensor)
        and isinstance(residual, torch.Tensor)
        and input.dtype == residual.dtype
        and not (input.is_cuda and torch.is_autocast_enabled("cuda"))
    )


def promote(
    input: torch.Tensor, residual: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the dtypes that kernels take for a sum of ``dtype``.

    That is ``dtype``, except that a half-precision ``input`` of a float32 sum is unchanged: under
    autocast, a linear's output is added to a float32 stream. Kernels read it without a copy.
    """
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALF):
        input = input.to(dtype)
    return input, residual if residual.dtype == dtype else residual.to(dtype)


def draw_seed(
    op: str, input: torch.Tensor, p: float, training: bool, seed: torch.Tensor | None
) -> tuple[torch.Tensor | None, float]:
    """Return the seed and the probability that the op receives: ``(None, 0.0)`` without dropout."""
    if seed is not None:
        philox.check_seed(op, seed, input.device)
    if not training or p == 0.0:
        return None, 0.0
    return philox.new_seed(input.device) if seed is None else seed, float(p)


def add(
    input: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None, p: float
) -> torch.Tensor:
    """Return ``residual + dropout(input)`` in the dtype of ``residual``, rounded once."""
    wide = dtypes.statistics_dtype(residual.dtype)
    total = residual.to(wide) + philox.dropout(input.to(wide), seed, p)
    return total.to(residual.dtype).contiguous()
