"""add_rms_norm in Triton: the kernels of ``_add_norm.py``, not centred."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _add_norm, _norm


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::add_rms_norm``."""
    input, residual, shape, weight, seed, eps, offset, rounding, dropout_p, input_dtype = args
    kind = _norm.rms_kind(offset, rounding)
    parameters = (weight, None, seed, eps, dropout_p, input_dtype)
    normed, summed, _, rstd = _add_norm.forward(kind, input, residual, shape, *parameters)
    return normed, summed, rstd


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_rms_norm_backward``."""
    grad_normed, grad_summed, summed, weight, rstd, seed = args[:6]
    shape, _, offset, rounding, dropout_p, input_dtype, output_mask = args[6:]
    kind = _norm.rms_kind(offset, rounding)
    tensors = (grad_normed, grad_summed, summed, weight, rstd, rstd, seed)
    numbers = (dropout_p, input_dtype, (*output_mask, False))
    return _add_norm.backward(kind, *tensors, shape, *numbers)[:3]
