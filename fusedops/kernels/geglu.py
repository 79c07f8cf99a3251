"""geglu in Triton: the kernels are those of ``_glu.py``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core.activation import GELU_VARIANTS
from fusedops.kernels import _glu


def forward(gate: torch.Tensor, up: torch.Tensor, approximate: str) -> torch.Tensor:
    return _glu.forward(gate, up, GELU_VARIANTS[approximate])


def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, gate, up, approximate, output_mask = args
    activation = GELU_VARIANTS[approximate]
    return _glu.backward(grad_output, gate, up, output_mask, activation=activation)
