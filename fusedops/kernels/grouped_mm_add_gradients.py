"""The gradients of grouped_mm, those of its parameters added to buffers: ``grouped_mm.py``'s."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import grouped_mm
from fusedops.kernels._grouped_arguments import GroupedMM, of_backward

_BUFFERS = 2


def supports(*args: Any) -> str | None:
    """Return why the kernels cannot run these arguments, or ``None``."""
    return grouped_mm.supports_backward(*args[_BUFFERS:])


def forward(*args: Any) -> torch.Tensor | None:
    """Launch them; arguments and results are those of ``fusedops::grouped_mm_add_gradients``."""
    into = args[:_BUFFERS]
    grad, call, kept, needed = of_backward(GroupedMM, args[_BUFFERS:])
    mask = [*needed, *(buffer is not None for buffer in into)]
    return grouped_mm.gradients(grad, call, kept, mask, into)[0]
