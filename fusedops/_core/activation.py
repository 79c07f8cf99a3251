"""The names and formulae of the activations, once.

The order of ``ACTIVATIONS`` is that of ``enum class Activation`` in ``csrc/cpu/activation.h``:
kernels receive the index. Every formula is made of differentiable torch operations, so that it
is also the specification of the first and second derivative.

The field's names disagree: what Hugging Face calls ``gelu`` is the erf form, its ``gelu_new``,
``gelu_pytorch_tanh`` and ``gelu_fast`` are the tanh form, and its ``quick_gelu`` is FastGelu.
"""

from __future__ import annotations

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

# torch's `approximate` argument of gelu, extended by "fast" -> the activation's name.
GELU_VARIANTS = {"none": "gelu", "tanh": "gelu_tanh", "fast": "fast_gelu"}
