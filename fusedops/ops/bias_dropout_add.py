"""Bias, dropout and residual sum in one pass, as at the end of each sublayer of a transformer.

    output = residual + dropout(input + bias)

Kernels: ``csrc/cpu/elementwise/bias_dropout_add.*``, ``kernels/bias_dropout_add.py``; the dropout
mask is that of ``_core/philox.py``. The gradient of ``residual`` is the incoming gradient itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding
from fusedops.ops import _residual


def bias_dropout_add(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float = 0.0,
    training: bool = True,
    *,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add ``input`` with its bias and dropout to the residual stream.

    ``output = residual + dropout(input + bias)``

    Args:
        input: ``[..., hidden_size]``, any floating dtype, any strides.
        bias: ``[hidden_size]`` or ``None``, any floating dtype.
        residual: the shape of ``input``, any floating dtype.
        p: probability with which an element is dropped; the others are scaled by ``1 / (1 - p)``.
            Dropped elements are 0 even if they were NaN or infinite (in torch they are 0 times
            their value).
        training: ``False`` turns dropout off.
        seed: int64 ``[2]``, the seed of the dropout mask; by default two numbers from torch's
            generator. A shard of a larger tensor needs more numbers (``_core/philox.py``).

    Returns:
        The shape of ``input``, contiguous, in the dtype of the sum in torch.

    Raises:
        ValueError: a shape or device does not fit, or ``p`` is outside [0, 1].
        TypeError: an argument is no tensor, or has no floating dtype.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once. The bias gradient
        is summed in a fixed order: the same bits for any number of threads. The dropout mask is
        drawn by a counter from a seed of torch's generator and never stored: the same in forward,
        backward, recomputation and on every backend. Saves the bias and the seed, no activation.
        Backends: cpp, triton, torch. Under autocast arguments keep their dtypes.

    Example:
        >>> import torch, fusedops
        >>> fusedops.bias_dropout_add(torch.ones(2), torch.tensor([1.0, 2.0]), torch.zeros(2))
        tensor([2., 3.])
    """
    dtype = _check(input, bias, residual, p, training)
    source, stream = _residual.promote(input, residual, dtype)
    if bias is not None and bias.dtype not in (source.dtype, dtype):
        bias = bias.to(dtype)
    seed, p = _residual.draw_seed("bias_dropout_add", source, p, training, seed)
    return _OP(source, bias, stream, seed, p, source.dtype)


def _check(input: Any, bias: Any, residual: Any, p: Any, training: Any) -> torch.dtype:
    op = "bias_dropout_add"
    dtype = _residual.check(op, input, residual, "p", p, training)
    if bias is not None:
        checks.like(op, "bias", bias, "input", input)
        if input.dim() == 0:
            checks.fail(op, "input", "a tensor with at least one dimension", "a scalar")
        checks.shape(op, "bias", bias, input.shape[-1:], "the last size of input")
        dtype = torch.promote_types(bias.dtype, dtype)
    return dtype


def _reference(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    seed: torch.Tensor | None,
    p: float,
    input_dtype: torch.dtype,
) -> torch.Tensor:
    accumulation = dtypes.statistics_dtype(residual.dtype)
    x = input.to(accumulation)
    if bias is not None:
        x = x + bias.to(accumulation)
    output = residual.to(accumulation) + philox.dropout(x, seed, p)
    return output.to(residual.dtype).contiguous()


def _fake(residual: torch.Tensor) -> torch.Tensor:
    return residual.new_empty(residual.shape)


def _wants_input(
    dtype: torch.dtype, p: float, input_dtype: torch.dtype, output_mask: Sequence[bool]
) -> bool:
    """Return whether the gradient of ``input`` differs from the incoming one, of ``dtype``."""
    same = philox.threshold(p) == 0 and input_dtype == dtype
    return output_mask[0] and not same


def _backward_reference(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, bias, seed, p, input_dtype, output_mask = args
    grad = philox.dropout(grad_output.to(dtypes.statistics_dtype(grad_output.dtype)), seed, p)
    grad_input = grad_bias = None
    if _wants_input(grad_output.dtype, p, input_dtype, output_mask):
        grad_input = grad.to(input_dtype).contiguous()
    if output_mask[1]:
        assert bias is not None
        rows = tuple(range(grad.dim() - 1))
        grad_bias = (grad.sum(rows) if rows else grad.clone()).to(bias.dtype)
    return grad_input, grad_bias, None


def _backward_fake(
    grad_output: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    grad_input = grad_bias = None
    if _wants_input(grad_output.dtype, p, input_dtype, output_mask):
        grad_input = grad_output.new_empty(grad_output.shape, dtype=input_dtype)
    if output_mask[1]:
        assert bias is not None
        grad_bias = bias.new_empty(bias.shape)
    return grad_input, grad_bias, None


def _cuts(ndim: int, seed: Any) -> list[tuple[Placement, Placement, Placement]]:
    """Return placements of the elements, the bias, and the sum that is the bias gradient.

    Elements are independent, unless dropout counts them from the tensor's beginning.
    """
    replicated: list[tuple[Placement, Placement, Placement]] = [(REPLICATE, REPLICATE, REPLICATE)]
    if seed is not None or ndim == 0:
        return replicated
    return [*replicated, *((dim, REPLICATE, PARTIAL) for dim in range(ndim - 1)), (ndim - 1, 0, 0)]


def _shard(
    input: Any, bias: Any, residual: Any, seed: Any, p: float, input_dtype: torch.dtype
) -> list[Sharding]:
    drawn = REPLICATE if seed is not None else None
    return [
        ([word], [word, parameter if bias is not None else None, word, drawn, None, None])
        for word, parameter, _ in _cuts(input.ndim, seed)
    ]


def _shard_backward(
    grad_output: Any,
    bias: Any,
    seed: Any,
    p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> list[Sharding]:
    drawn = REPLICATE if seed is not None else None
    needs_input = _wants_input(grad_output.tensor_meta.dtype, p, input_dtype, output_mask)
    return [
        (
            [word if needs_input else None, summed if output_mask[1] else None, None],
            [word, parameter if bias is not None else None, drawn, None, None, None],
        )
        for word, parameter, summed in _cuts(grad_output.ndim, seed)
    ]


_OP = define_op(
    "bias_dropout_add",
    "(Tensor input, Tensor? bias, Tensor residual, Tensor? seed, float p, ScalarType input_dtype)"
    " -> (Tensor output)",
    contract={
        "input": "input_dtype [*shape]",
        "residual, output": "param(input_dtype) as T [*shape]",
        "bias": "input_dtype | T [shape[-1]]",
        "seed": "int64 [numbers]",
        "numbers": "numbers == 2 or numbers > 5",
        "p": "0 <= p <= 1",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "bias", "residual"),
        outputs=("output",),
        saves=("bias", "seed"),
        reference=_backward_reference,
        fake=_backward_fake,
        same={"input": "grad_output", "residual": "grad_output"},
    ),
    triton="fusedops.kernels.bias_dropout_add",
    shard=_shard,
    shard_backward=_shard_backward,
)
