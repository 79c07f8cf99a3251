"""Bias, dropout and residual sum in one pass, as at the end of each sublayer of a transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox, sharding
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
        Under autocast arguments keep their dtypes.

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


def _reference(*args: Any) -> torch.Tensor:
    input, bias, residual, seed, p, _ = args
    x = input.to(dtypes.statistics_dtype(residual.dtype))
    if bias is not None:
        x = x + bias.to(x.dtype)
    return _residual.add(x, residual, seed, p)


def _computed(
    grad_output: Any, p: float, input_dtype: torch.dtype, output_mask: Sequence[bool]
) -> tuple[bool, bool, bool]:
    """Return which gradients differ from the incoming one, which is that of ``residual``."""
    same = philox.threshold(p) == 0 and input_dtype == sharding.meta(grad_output).dtype
    return output_mask[0] and not same, output_mask[1], False


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, bias, seed, p, input_dtype, output_mask = args
    grad = philox.dropout(grad_output.to(dtypes.statistics_dtype(grad_output.dtype)), seed, p)
    grad_input = grad_bias = None
    if _computed(grad_output, p, input_dtype, output_mask)[0]:
        grad_input = grad.to(input_dtype).contiguous()
    if output_mask[1]:
        assert bias is not None
        rows = tuple(range(grad.dim() - 1))
        grad_bias = (grad.sum(rows) if rows else grad.clone()).to(bias.dtype)
    return grad_input, grad_bias, None


def _cuts(elements: Any, seed: Any) -> list[tuple[Placement, Placement, Placement]]:
    """Return placements of the elements, the bias, and the sum that is the bias gradient.

    Elements are independent, unless dropout counts them from the tensor's beginning.
    """
    cuts: list[tuple[Placement, Placement, Placement]] = [(REPLICATE, REPLICATE, REPLICATE)]
    if seed is None and elements.ndim > 0:
        last = elements.ndim - 1
        cuts += [*((dim, REPLICATE, PARTIAL) for dim in range(last)), (last, 0, 0)]
    return cuts


def _shard(input: Any, seed: Any) -> list[Sharding]:
    return [([dim], [dim, bias, dim, REPLICATE]) for dim, bias, _ in _cuts(input, seed)]


def _shard_backward(grad_output: Any, seed: Any) -> list[Sharding]:
    cuts = _cuts(grad_output, seed)
    return [([dim, summed, dim], [dim, bias, REPLICATE]) for dim, bias, summed in cuts]


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
    gradient=Gradient(
        inputs=("input", "bias", "residual"),
        outputs=("output",),
        saves=("bias", "seed"),
        reference=_backward,
        computed=_computed,
        aliases={"input": "grad_output", "residual": "grad_output"},
    ),
    triton="fusedops.kernels.bias_dropout_add",
    shard=_shard,
    shard_backward=_shard_backward,
)
