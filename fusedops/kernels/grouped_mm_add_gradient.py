"""The weight gradient of grouped_mm, added to a buffer: a launcher of ``_grouped.py``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _grouped


def forward(
    into: torch.Tensor, input: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Launch it; arguments are those of ``fusedops::grouped_mm_add_gradient``."""
    _grouped.add_weight_gradient(into, input, grad, offsets)


def static_report_cases() -> list[dict[str, Any]]:
    """Return nothing: the kernels are grouped_mm's, reported there."""
    return []
