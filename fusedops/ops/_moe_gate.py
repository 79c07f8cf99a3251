"""The gates of experts, in differentiable torch operations: what stands between the two products.

``z`` holds gate and up in its two halves or, interleaved, side by side; without a gate it is the
argument of the activation.
"""

from __future__ import annotations

import torch

from fusedops._core.activation import ACTIVATIONS, value
from fusedops._core.activation import gradient as activation_gradient

# GPT-OSS's: gate and up are clamped, up is shifted by one.
SWIGLU_OAI = "swiglu_oai"
LIMIT = 7.0
GATES = (*ACTIVATIONS, SWIGLU_OAI)


def split(z: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up of ``[rows, 2 * inner]``."""
    if interleaved:
        return z[:, ::2], z[:, 1::2]
    gate, up = z.chunk(2, dim=1)
    return gate, up


def join(gate: torch.Tensor, up: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack([gate, up], dim=2).flatten(1)
    return torch.cat([gate, up], dim=1)


def hidden_of(z: torch.Tensor, activation: str, gated: bool, interleaved: bool) -> torch.Tensor:
    if not gated:
        return value(z, activation)
    gate, up = split(z, interleaved)
    if activation == SWIGLU_OAI:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return value(gate, "fast_gelu") * (up + 1)
    return value(gate, activation) * up


def preactivation_gradient(
    grad: torch.Tensor, z: torch.Tensor, activation: str, gated: bool, interleaved: bool
) -> torch.Tensor:
    if not gated:
        return activation_gradient(grad, z, activation)
    gate, up = split(z, interleaved)
    if activation == SWIGLU_OAI:
        bounded, factor = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        # As the gradient of torch's clamp: 0 of what was bounded, and of NaN.
        grad_gate = activation_gradient(grad * factor, bounded, "fast_gelu")
        grad_gate = torch.where(gate <= LIMIT, grad_gate, 0.0)
        grad_up = torch.where(up.abs() <= LIMIT, grad * value(bounded, "fast_gelu"), 0.0)
    else:
        grad_gate = activation_gradient(grad * up, gate, activation)
        grad_up = grad * value(gate, activation)
    return join(grad_gate, grad_up, interleaved)
