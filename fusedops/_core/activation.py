"""The names and formulae of the activations, once.

The order of ``ACTIVATIONS`` is that of ``enum class Activation`` in
``csrc/cpu/elementwise/activation.h``: kernels find it by name. Every formula is made of
differentiable torch operations, so that it is also the specification of the first and second
derivative.

The field's names disagree: what Hugging Face calls ``gelu`` is the erf form, its ``gelu_new``,
``gelu_pytorch_tanh`` and ``gelu_fast`` are the tanh form, and its ``quick_gelu`` is FastGelu.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

FAST_GELU_SLOPE = 1.702


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(1.702 x)`` (Hendrycks and Gimpel, arXiv:1606.08415, section 2)."""
    return x * torch.sigmoid(FAST_GELU_SLOPE * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "fast_gelu": fast_gelu,
}


def value(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the activation of ``x``: the specification of the kernels' forward."""
    y = ACTIVATIONS[name](x)
    # torch's own is inf at inf in float64 and of one element, but NaN in vectors of float32.
    return torch.where(x == torch.inf, x, y) if name == "gelu" else y


def _gated_slope(x: torch.Tensor, z: torch.Tensor, dz: torch.Tensor | float) -> torch.Tensor:
    """Return the derivative of ``x * sigmoid(z(x))`` given ``z`` and ``dz = z'(x)``."""
    return torch.sigmoid(z) + x * (dz * torch.sigmoid(z) * torch.sigmoid(-z))


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return 0.5 * torch.erfc(x * -math.sqrt(0.5)) + x * density


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    # (1 + tanh u) / 2 = sigmoid(2 u). The cube overflows before x does; x - x is NaN at infinities.
    bounded = x.clamp(-1e3, 1e3)
    scale = math.sqrt(8 / math.pi)
    z = scale * (bounded + 0.044715 * bounded * bounded.square())
    return _gated_slope(bounded, z, scale * (1 + 3 * 0.044715 * bounded.square())) + (x - x)


# The derivatives, of relu where it passes x on.
_SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": torch.ones_like,
    "relu": torch.ones_like,
    "relu2": lambda x: 2 * x,
    "silu": lambda x: _gated_slope(x, x, 1.0),
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "fast_gelu": lambda x: _gated_slope(x, FAST_GELU_SLOPE * x, FAST_GELU_SLOPE),
}


def gradient(grad: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``grad`` times the derivative at ``x``: the specification of the kernels' backward.

    Made of differentiable torch operations. As in torch's own, nothing passes what relu stopped,
    NaN neither, and all passes where ``x`` is NaN.
    """
    product = grad * _SLOPES[name](x)
    return torch.where(x <= 0, 0.0, product) if name in ("relu", "relu2") else product


# torch's `approximate` argument of gelu, extended by "fast" -> the activation's name.
GELU_VARIANTS = {"none": "gelu", "tanh": "gelu_tanh", "fast": "fast_gelu"}
