"""The gradients of moe_mlp, those of its parameters added to buffers: ``moe_mlp.py``'s."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import moe_mlp
from fusedops.kernels._arguments import MoeArguments, of_add_gradients


def supports(*args: Any) -> str | None:
    return moe_mlp.supports_backward(*args[4:])


def forward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    return moe_mlp.gradients(*of_add_gradients(MoeArguments, args))[:2]
