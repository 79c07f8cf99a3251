"""The gates of experts, in differentiable torch operations: what stands between the two products.

``z`` holds gate and up in its two halves or, interleaved, side by side; without a gate it is the
argument of the activation.
"""

from __future__ import annotations

import torch

from fusedops._core.activation import ACTIVATIONS, SLOPES

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
    """Return what ``split`` takes apart."""
    if interleaved:
        return torch.stack([gate, up], dim=2).flatten(1)
    return torch.cat([gate, up], dim=1)


def hidden_of(z: torch.Tensor, activation: str, gated: bool, interleaved: bool) -> torch.Tensor:
    """Return the hidden layer ``[rows, inner]``."""
    if not gated:
        return ACTIVATIONS[activation](z)
    gate, up = split(z, interleaved)
    if activation == SWIGLU_OAI:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return ACTIVATIONS["fast_gelu"](gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def preactivation_gradient(
    grad: torch.Tensor, z: torch.Tensor, activation: str, gated: bool, interleaved: bool
) -> torch.Tensor:
    """Return the gradient of ``z`` from that of the hidden layer."""
    if not gated:
        return grad * SLOPES[activation](z)
    gate, up = split(z, interleaved)
    if activation == SWIGLU_OAI:
        bounded, factor = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        grad_gate = grad * factor * SLOPES["fast_gelu"](bounded) * (gate <= LIMIT)
        grad_up = grad * ACTIVATIONS["fast_gelu"](bounded) * (up.abs() <= LIMIT)
    else:
        grad_gate = grad * up * SLOPES[activation](gate)
        grad_up = grad * ACTIVATIONS[activation](gate)
    return join(grad_gate, grad_up, interleaved)
