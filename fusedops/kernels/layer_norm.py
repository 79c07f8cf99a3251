"""layer_norm in Triton: the kernels of ``_norm.py``, centred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _norm
from fusedops.kernels._norm import LAYER_NORM


def forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::layer_norm``."""
    return _norm.forward(LAYER_NORM, input, normalized_shape, weight, bias, eps)


def backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::layer_norm_backward``."""
    return _norm.backward(
        LAYER_NORM, grad_output, input, weight, mean, rstd, normalized_shape, output_mask
    )


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _norm.static_report_cases(centred=True)
