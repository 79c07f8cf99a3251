"""moe_permute in Triton: the launchers. The kernels are those of ``_moe_rows.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops.kernels import _moe_rows

forward = _moe_rows.scatter


def backward(
    grad_output: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    output_mask: Sequence[bool],
) -> torch.Tensor | None:
    """Launch the backward; as ``fusedops::moe_permute_backward``."""
    return _moe_rows.combine(grad_output, None, positions, offsets) if output_mask[0] else None
