"""layer_norm in Triton: the kernels of ``_norm.py``, centred."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _norm
from fusedops.kernels._norm import LAYER_NORM


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::layer_norm``."""
    return _norm.forward(LAYER_NORM, *args)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::layer_norm_backward``."""
    grad_output, input, weight, mean, rstd, shape, _, output_mask = args
    return _norm.backward(LAYER_NORM, grad_output, input, weight, mean, rstd, shape, output_mask)


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _norm.static_report_cases(centred=True)
