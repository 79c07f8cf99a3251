"""moe_permute in Triton: the launchers. The kernels are those of ``_moe_rows.py``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _moe_rows

forward = _moe_rows.scatter


def backward(*args: Any) -> torch.Tensor | None:
    grad_output, positions, offsets, output_mask = args
    return _moe_rows.combine(grad_output, None, positions, offsets) if output_mask[0] else None
