"""geglu in Triton: the kernels are those of ``_glu.py``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core.activation import GELU_VARIANTS
from fusedops.kernels import _glu


def forward(gate: torch.Tensor, up: torch.Tensor, approximate: str) -> torch.Tensor:
    """Launch the forward; arguments and result are those of ``fusedops::geglu``."""
    return _glu.forward(gate, up, GELU_VARIANTS[approximate])


def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; arguments and results are those of ``fusedops::geglu_backward``."""
    grad_output, gate, up, approximate, output_mask = args
    return _glu.backward(grad_output, gate, up, output_mask, GELU_VARIANTS[approximate])
