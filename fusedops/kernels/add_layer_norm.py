"""add_layer_norm in Triton: the kernels of ``_add_norm.py``, centred."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops.kernels import _add_norm
from fusedops.kernels._norm import LAYER_NORM

forward = functools.partial(_add_norm.forward, LAYER_NORM)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::add_layer_norm_backward``."""
    before_eps, after_eps = args[:8], args[9:]
    return _add_norm.backward(LAYER_NORM, *before_eps, *after_eps)
