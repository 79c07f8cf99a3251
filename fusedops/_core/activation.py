"""The names and formulae of the activations, once.

The order of ``ACTIVATIONS`` is that of ``enum class Activation`` in ``csrc/cpu/activation.h``:
kernels find it by name. Every formula is made of differentiable torch operations, so that it
is also the specification of the first and second derivative.

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


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": _identity,
    "relu": torch.relu,
    "relu2": _relu2,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "fast_gelu": fast_gelu,
}


def value(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``silu`` or a GELU of ``x`` with its limits at infinities, where eager has a NaN."""
    return torch.where(x.isinf(), x.clamp_min(0.0), ACTIVATIONS[name](x))


def _bounded(x: torch.Tensor) -> torch.Tensor:
    """Bound ``x`` to where a slope is 0 or 1: x * 0 of an infinity would be NaN."""
    return x.clamp(-1e3, 1e3)


def _gated_slope(x: torch.Tensor, z: torch.Tensor, dz: torch.Tensor | float) -> torch.Tensor:
    """Return the derivative of ``x * sigmoid(z(x))`` given ``z`` and ``dz = z'(x)``."""
    return torch.sigmoid(z) + x * dz * torch.sigmoid(z) * torch.sigmoid(-z)


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    x = _bounded(x)
    return _gated_slope(x, x, 1.0)


def _fast_gelu_slope(x: torch.Tensor) -> torch.Tensor:
    x = _bounded(x)
    return _gated_slope(x, FAST_GELU_SLOPE * x, FAST_GELU_SLOPE)


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    x = _bounded(x)
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return 0.5 * torch.erfc(x * -math.sqrt(0.5)) + x * density


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    x = _bounded(x)
    # (1 + tanh u) / 2 = sigmoid(2 u)
    scale = math.sqrt(8 / math.pi)
    z = scale * (x + 0.044715 * x * x.square())
    return _gated_slope(x, z, scale * (1 + 3 * 0.044715 * x.square()))


# The derivatives, in differentiable torch operations: the specification of the kernels' backward.
SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": torch.ones_like,
    "relu": lambda x: (x > 0).to(x.dtype),
    "relu2": lambda x: 2 * torch.relu(x),
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "fast_gelu": _fast_gelu_slope,
}

# torch's `approximate` argument of gelu, extended by "fast" -> the activation's name.
GELU_VARIANTS = {"none": "gelu", "tanh": "gelu_tanh", "fast": "fast_gelu"}
