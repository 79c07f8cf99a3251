"""layer_norm in Triton: the kernels of ``_norm.py``, centred."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops.kernels import _norm
from fusedops.kernels._norm import LAYER_NORM

forward = functools.partial(_norm.forward, LAYER_NORM)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::layer_norm_backward``."""
    grad_output, input, weight, mean, rstd, shape, _, output_mask = args
    return _norm.backward(LAYER_NORM, grad_output, input, weight, mean, rstd, shape, output_mask)
