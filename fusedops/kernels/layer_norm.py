"""layer_norm in Triton: the kernels of ``_norm.py``, centred."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _norm


def forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Launch the forward; arguments and results are those of ``fusedops::layer_norm``."""
    normed, _, mean, rstd = _norm.forward(_norm.LAYER_NORM, *args)
    return normed, mean, rstd


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::layer_norm_backward``."""
    grad_output, input, weight, mean, rstd, shape, _, output_mask = args
    tensors = (grad_output, None, input, weight, mean, rstd, None)
    mask = (False, *output_mask)
    return _norm.backward(_norm.LAYER_NORM, *tensors, shape, 0.0, input.dtype, mask)[1:]
