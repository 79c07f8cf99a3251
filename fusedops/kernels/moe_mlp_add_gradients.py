"""The gradients of moe_mlp, those of its parameters added to buffers: ``moe_mlp.py``'s."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import moe_mlp
from fusedops.kernels._grouped_arguments import MoeMLP, of_backward

_BUFFERS = 4


def supports(*args: Any) -> str | None:
    """Return why the kernels cannot run these arguments, or ``None``."""
    return moe_mlp.supports_backward(*args[_BUFFERS:])


def forward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch them; arguments and results are those of ``fusedops::moe_mlp_add_gradients``."""
    into = args[:_BUFFERS]
    grad, call, preactivation, needed = of_backward(MoeMLP, args[_BUFFERS:])
    mask = [*needed, *(buffer is not None for buffer in into)]
    return moe_mlp.gradients(grad, call, preactivation, mask, into)[:2]
