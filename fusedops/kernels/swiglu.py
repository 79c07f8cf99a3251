"""swiglu in Triton: the kernels are those of ``_glu.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _glu


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Launch the forward; arguments and result are those of ``fusedops::swiglu``."""
    return _glu.forward(gate, up, "silu")


def backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, output_mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; arguments and results are those of ``fusedops::swiglu_backward``."""
    return _glu.backward(grad_output, gate, up, "silu", output_mask)


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _glu.static_report_cases(("silu",))
