"""GELU: each element times the probability that a normal variable is below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import GELU_VARIANTS, gradient, value
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding


def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Apply the Gaussian error linear unit to each element.

    ``y = x * Phi(x)``, where Phi is the distribution function of the normal distribution, or an
    approximation.

    Args:
        input: any shape, any floating dtype, any strides.
        approximate: ``"none"`` is the erf form (Hugging Face's ``gelu``); ``"tanh"`` is
            ``x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`` (``gelu_new``,
            ``gelu_pytorch_tanh``, ``gelu_fast``); ``"fast"`` is FastGelu, ``x * sigmoid(1.702 x)``
            (``quick_gelu``).

    Returns:
        Shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: ``approximate`` is none of these.
        TypeError: ``input`` is no tensor of a floating dtype.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once. Finite inputs do
        not overflow. Infinities give torch's results: inf at inf, NaN at -inf, and a derivative of
        NaN. Saves ``input`` only. Autocast does not change the call, as for torch's function.

    Reference:
        Hendrycks, Gimpel: Gaussian Error Linear Units, arXiv:1606.08415.

    Example:
        >>> import torch, fusedops
        >>> fusedops.gelu(torch.tensor([-1.0, 0.0, 2.0]), approximate="fast")
        tensor([-0.1542,  0.0000,  1.9357])
    """
    _check("gelu", input, approximate)
    return _OP(input, approximate)


def _check(op: str, input: Any, approximate: Any) -> None:
    checks.tensor(op, "input", input)
    checks.choice(op, "approximate", approximate, GELU_VARIANTS)


def _reference(input: torch.Tensor, approximate: str) -> torch.Tensor:
    x = input.to(dtypes.statistics_dtype(input.dtype))
    return value(x, GELU_VARIANTS[approximate]).to(input.dtype).contiguous()


def _backward(
    grad_output: torch.Tensor, input: torch.Tensor, approximate: str, output_mask: Sequence[bool]
) -> torch.Tensor | None:
    if not output_mask[0]:
        return None
    x = input.to(dtypes.statistics_dtype(input.dtype))
    grad = gradient(grad_output.to(x.dtype), x, GELU_VARIANTS[approximate])
    return grad.to(input.dtype).contiguous()


def _shard(input: Any) -> list[Sharding]:
    """Elements are independent: any dim may be sharded."""
    return [([dim], [dim]) for dim in (REPLICATE, *range(input.ndim))]


_OP = define_op(
    "gelu",
    "(Tensor input, str approximate) -> (Tensor output)",
    contract={"input, output": "T [*shape]", "approximate": tuple(GELU_VARIANTS)},
    reference=_reference,
    gradient=Gradient(
        inputs=("input",), outputs=("output",), saves=("input",), reference=_backward
    ),
    triton="fusedops.kernels.gelu",
    shard=_shard,
)
