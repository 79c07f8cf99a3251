"""What ``swiglu`` and ``geglu`` do alike: ``y = act(gate) * up``, element by element.

``act`` is a name of ``_core/activation.py``: ``silu`` or a variant of GELU. The gradients are
``dy * up * act'(gate)`` and ``dy * act(gate)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import gradient, value
from fusedops._core.sharding import REPLICATE, Sharding


def check(op: str, gate: Any, up: Any) -> None:
    """Raise unless ``gate`` and ``up`` are alike."""
    checks.tensor(op, "gate", gate)
    checks.like(op, "up", up, "gate", gate, dtype=True)
    checks.shape(op, "up", up, gate.shape, "that of gate")


def forward(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """Return the result in torch operations: the specification of the forward."""
    wide = dtypes.statistics_dtype(gate.dtype)
    return (value(gate.to(wide), act) * up.to(wide)).to(gate.dtype).contiguous()


def backward(
    grad_output: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    act: str,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients in torch operations: the specification of the backward."""
    wide = dtypes.statistics_dtype(gate.dtype)
    grad, x = grad_output.to(wide), gate.to(wide)
    grad_gate = grad_up = None
    if output_mask[0]:
        grad_gate = gradient(grad * up.to(wide), x, act).to(gate.dtype).contiguous()
    if output_mask[1]:
        grad_up = (grad * value(x, act)).to(gate.dtype).contiguous()
    return grad_gate, grad_up


def shard(gate: Any) -> list[Sharding]:
    """Elements are independent: any dim may be sharded."""
    return [([dim], [dim, dim]) for dim in (REPLICATE, *range(gate.ndim))]
