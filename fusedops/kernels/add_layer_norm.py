"""add_layer_norm in Triton: the kernels of ``_add_norm.py``, centred."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _add_norm
from fusedops.kernels._norm import LAYER_NORM


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::add_layer_norm``."""
    return _add_norm.forward(LAYER_NORM, *args)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_layer_norm_backward``."""
    grad_normed, grad_summed, summed, weight, mean, rstd, seed = args[:7]
    shape, _, dropout_p, input_dtype, output_mask = args[7:]
    tensors = (grad_normed, grad_summed, summed, weight, mean, rstd, seed)
    return _add_norm.backward(LAYER_NORM, *tensors, shape, dropout_p, input_dtype, output_mask)


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _add_norm.static_report_cases(centred=True)
