"""rms_norm in Triton: the kernels of ``_norm.py``, not centred."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _norm


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::rms_norm``."""
    input, normalized_shape, weight, eps, *variant = args
    kind = _norm.rms_kind(*variant)
    output, _, rstd = _norm.forward(kind, input, normalized_shape, weight, None, eps)
    return output, rstd


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::rms_norm_backward``."""
    grad_output, input, weight, rstd, normalized_shape, _, *variant, output_mask = args
    tensors = (grad_output, input, weight, rstd, rstd)
    mask = (*output_mask, False)
    return _norm.backward(_norm.rms_kind(*variant), *tensors, normalized_shape, mask)[:2]
