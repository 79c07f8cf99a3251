"""Layers of the hub package that replace those of transformers; no module of fusedops.

``tools/hub_package.py`` copies this file. ``kernels`` replaces the ``forward`` of a layer by one of
these, which have therefore no constructor and no members beside it: they read those of the layer.
"""

from __future__ import annotations

import torch
from torch import nn

from fusedops.ops import geglu, gelu, rms_norm, swiglu

__all__ = ["GELU", "GELUTanh", "GeGLUMLP", "RMSNorm", "SwiGLUMLP"]


class RMSNorm(nn.Module):
    """``transformers``' RMSNorm of Llama and its like; one pass over memory."""

    can_torch_compile = True
    has_backward = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised hidden states, ``[..., hidden_size]``."""
        shape, eps = self.weight.shape, self.variance_epsilon
        return rms_norm(hidden_states, shape, self.weight, eps, rounding="hf")


class GELU(nn.Module):
    """The exact GELU (``GeLU``)."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the activation, elementwise."""
        return gelu(input)


class GELUTanh(nn.Module):
    """The GELU of a hyperbolic tangent (``GeluTanh``, ``NewGELU``, ``FastGELU``)."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the activation, elementwise."""
        return gelu(input, approximate="tanh")


class SwiGLUMLP(nn.Module):
    """The MLP of Llama and its like: ``down(silu(gate(x)) * up(x))`` with a fused product."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP of hidden states, ``[..., hidden_size]``."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLUMLP(nn.Module):
    """The MLP of Gemma: ``down(gelu_tanh(gate(x)) * up(x))`` with a fused product."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP of hidden states, ``[..., hidden_size]``."""
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate="tanh"))
