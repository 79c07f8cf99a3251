"""Bias and GELU in one pass, as between the two linear layers of a transformer's MLP."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import GELU_VARIANTS, gradient, value
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding


def bias_gelu(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Add a bias to the last dimension and apply the Gaussian error linear unit.

    ``y = gelu(x + bias)``

    Args:
        input: ``[..., columns]``, any floating dtype, any strides.
        bias: ``[columns]``, dtype of ``input`` (float32 is also accepted if that is a
            half-precision dtype).
        approximate: ``"none"`` (erf), ``"tanh"`` or ``"fast"`` (``x * sigmoid(1.702 x)``): see
            ``fusedops.gelu``.

    Returns:
        Shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, or ``approximate`` is unknown.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Sum and activation are float32 (float64 for float64); the result is rounded once, where
        eager torch also rounds the sum. The bias gradient is summed in a fixed order: the same bits
        for any number of threads. Saves ``input`` and ``bias`` only. Under autocast all arguments
        are cast to the widest dtype among them.

    Reference:
        Hendrycks, Gimpel: Gaussian Error Linear Units, arXiv:1606.08415.

    Example:
        >>> import torch, fusedops
        >>> fusedops.bias_gelu(torch.tensor([[-2.0, 1.0]]), torch.tensor([1.0, 1.0]))
        tensor([[-0.1587,  1.9545]])
    """
    _check(input, bias, approximate)
    return _OP(input, bias, approximate)


def _check(input: Any, bias: Any, approximate: Any) -> None:
    op = "bias_gelu"
    checks.tensor(op, "input", input)
    if input.dim() == 0:
        checks.fail(op, "input", "a tensor with at least one dimension", "a scalar")
    checks.parameter(op, "bias", bias, "input", input)
    checks.shape(op, "bias", bias, input.shape[-1:], "the last size of input")
    checks.choice(op, "approximate", approximate, GELU_VARIANTS)


def _sum(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    dtype = dtypes.statistics_dtype(input.dtype)
    return input.to(dtype) + bias.to(dtype)


def _reference(input: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    return value(_sum(input, bias), GELU_VARIANTS[approximate]).to(input.dtype).contiguous()


def _backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, input, bias, approximate, output_mask = args
    x = _sum(input, bias)
    grad = gradient(grad_output.to(x.dtype), x, GELU_VARIANTS[approximate])
    grad_input = grad_bias = None
    if output_mask[0]:
        grad_input = grad.to(input.dtype).contiguous()
    if output_mask[1]:
        rows = tuple(range(input.dim() - 1))
        grad_bias = (grad.sum(rows) if rows else grad.clone()).to(bias.dtype)
    return grad_input, grad_bias


def _shard(input: Any) -> list[Sharding]:
    """Rows are independent, and so are columns, with the bias cut as they are."""
    last = input.ndim - 1
    rules: list[Sharding] = [([dim], [dim, REPLICATE]) for dim in (REPLICATE, *range(last))]
    return [*rules, ([last], [last, 0])]


_OP = define_op(
    "bias_gelu",
    "(Tensor input, Tensor bias, str approximate) -> (Tensor output)",
    contract={
        "input, output": "T [*rows, columns]",
        "bias": "param(T) [columns]",
        "approximate": tuple(GELU_VARIANTS),
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "bias"), outputs=("output",), saves=("input", "bias"), reference=_backward
    ),
    autocast="promote",
    triton="fusedops.kernels.bias_gelu",
    shard=_shard,
)
