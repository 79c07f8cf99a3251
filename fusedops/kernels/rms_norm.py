"""rms_norm in Triton: the kernels of ``_norm.py``, not centred."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _norm


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::rms_norm``."""
    input, normalized_shape, weight, eps, *options = args
    variant = _norm.rms_variant(*options)
    normed, _, _, rstd = _norm.forward(variant, input, normalized_shape, weight, None, eps)
    return normed, rstd


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::rms_norm_backward``."""
    grad_output, input, weight, rstd, shape, _, *options, output_mask = args
    variant = _norm.rms_variant(*options)
    tensors = (grad_output, None, input, weight, rstd, rstd, None)
    mask = (False, *output_mask, False)
    return _norm.backward(variant, *tensors, shape, 0.0, input.dtype, mask)[1:3]
