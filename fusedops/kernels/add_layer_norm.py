"""add_layer_norm in Triton: the kernels of ``_add_norm.py``, centred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _add_norm
from fusedops.kernels._norm import LAYER_NORM


def forward(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::add_layer_norm``."""
    arguments = (input, residual, normalized_shape, weight, bias, seed, eps, dropout_p, input_dtype)
    return _add_norm.forward(LAYER_NORM, *arguments)


def backward(
    grad_normed: torch.Tensor | None,
    grad_summed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    dropout_p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_layer_norm_backward``."""
    return _add_norm.backward(
        LAYER_NORM,
        grad_normed,
        grad_summed,
        summed,
        weight,
        mean,
        rstd,
        seed,
        normalized_shape,
        dropout_p,
        input_dtype,
        output_mask,
    )


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _add_norm.static_report_cases(centred=True)
