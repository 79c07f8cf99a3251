"""add_rms_norm in Triton: the kernels of ``_norm.py``, not centred, with a residual."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _norm


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::add_rms_norm``."""
    input, residual, shape, weight, seed, eps, offset, rounding, dropout_p, _ = args
    variant, summand = _norm.rms_variant(offset, rounding), (residual, seed, dropout_p)
    normed, summed, _, rstd = _norm.forward(variant, input, shape, weight, None, eps, *summand)
    return normed, summed, rstd


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_rms_norm_backward``."""
    grad_normed, grad_summed, summed, weight, rstd, seed = args[:6]
    shape, _, offset, rounding, dropout_p, input_dtype, output_mask = args[6:]
    variant = _norm.rms_variant(offset, rounding)
    tensors = (grad_normed, grad_summed, summed, weight, rstd, rstd, seed)
    numbers = (dropout_p, input_dtype, (*output_mask, False))
    return _norm.backward(variant, *tensors, shape, *numbers)[:3]
