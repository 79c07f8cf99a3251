"""add_rms_norm in Triton: the kernels of ``_add_norm.py``, not centred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _add_norm, _norm


def forward(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
    dropout_p: float,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::add_rms_norm``."""
    kind = _norm.rms_kind(weight_offset, rounding)
    parameters = (weight, None, seed, eps, dropout_p, input_dtype)
    normed, summed, _, rstd = _add_norm.forward(
        kind, input, residual, normalized_shape, *parameters
    )
    return normed, summed, rstd


def backward(
    grad_normed: torch.Tensor | None,
    grad_summed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    rounding: str,
    dropout_p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_rms_norm_backward``."""
    return _add_norm.backward(
        _norm.rms_kind(weight_offset, rounding),
        grad_normed,
        grad_summed,
        summed,
        weight,
        rstd,
        rstd,
        seed,
        normalized_shape,
        dropout_p,
        input_dtype,
        (*output_mask, False),
    )[:3]


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _add_norm.static_report_cases(centred=False)
