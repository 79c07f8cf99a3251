"""rms_norm in Triton: the kernels of ``_norm.py``, not centred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _norm


def forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::rms_norm``."""
    kind = _norm.rms_kind(weight_offset, rounding)
    output, _, rstd = _norm.forward(kind, input, normalized_shape, weight, None, eps)
    return output, rstd


def backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    rounding: str,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::rms_norm_backward``."""
    kind = _norm.rms_kind(weight_offset, rounding)
    wanted = (*output_mask, False)
    return _norm.backward(kind, grad_output, input, weight, rstd, rstd, normalized_shape, wanted)[
        :2
    ]


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _norm.static_report_cases(centred=False)
