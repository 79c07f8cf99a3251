"""add_layer_norm in Triton: the kernels of ``_norm.py``, centred, with a residual."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _norm


def forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Launch the forward; arguments and results are those of ``fusedops::add_layer_norm``."""
    input, residual, shape, weight, bias, seed, eps, dropout_p, _ = args
    summand = (residual, seed, dropout_p)
    return _norm.forward(_norm.LAYER_NORM, input, shape, weight, bias, eps, *summand)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_layer_norm_backward``."""
    before_eps, after_eps = args[:8], args[9:]
    return _norm.backward(_norm.LAYER_NORM, *before_eps, *after_eps)
