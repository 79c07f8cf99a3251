"""The gradients of grouped_mm, those of its parameters added to buffers: ``grouped_mm.py``'s."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import grouped_mm
from fusedops.kernels._arguments import GroupedArguments, of_add_gradients


def supports(*args: Any) -> str | None:
    return grouped_mm.supports_backward(*args[2:])


def forward(*args: Any) -> torch.Tensor | None:
    return grouped_mm.gradients(*of_add_gradients(GroupedArguments, args))[0]
