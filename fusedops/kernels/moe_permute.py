"""moe_permute in Triton: the launchers. The kernels are those of ``_moe_rows.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _moe_rows


def forward(input: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Launch the forward; arguments and result are those of ``fusedops::moe_permute``."""
    return _moe_rows.scatter(input, positions, offsets)


def backward(
    grad_output: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    output_mask: Sequence[bool],
) -> torch.Tensor | None:
    """Launch the backward; as ``fusedops::moe_permute_backward``."""
    return _moe_rows.combine(grad_output, None, positions, offsets) if output_mask[0] else None


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return [
        _moe_rows.scatter_report(2),
        _moe_rows.scatter_report(8),
        _moe_rows.scatter_report(0),
        _moe_rows.combine_report(8, weighted=False),
    ]
