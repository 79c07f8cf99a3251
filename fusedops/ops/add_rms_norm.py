"""Dropout, residual sum and root-mean-square normalisation in one pass.

    summed = residual + dropout(input)
    normed = rms_norm(summed) * (weight + weight_offset)

``summed`` is rounded to its dtype before it is normalised, so that both results are those of the
eager operations. Kernels: ``csrc/cpu/norm/norm.*``, ``csrc/cuda/add_norm.*``,
``kernels/add_rms_norm.py``; the dropout mask is that of ``_core/philox.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import dtypes, philox
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, ROW, ROW_SUM, Sharding, row_shardings, where
from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math, _residual
from fusedops.ops._norm_math import (
    counted_row_placements,
    default_eps,
    in_float32,
    input_gradient,
    normalize_rms,
    offset,
    rows,
    scale,
    scaled_dtype,
    sum_rows,
)
from fusedops.ops._residual import needed_gradients


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "torch",
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream and divide the sum by its root mean square.

    ``summed = residual + dropout(input); normed = rms_norm(summed) * (weight + weight_offset)``

    Args:
        input: ``[..., *normalized_shape]``, any floating dtype, any strides.
        residual: the shape of ``input``, any floating dtype.
        normalized_shape: sizes of the trailing dimensions.
        weight: ``normalized_shape``, dtype of the sum (float32 is also accepted if that is a
            half-precision dtype).
        eps: added to the mean square; ``None``: as ``rms_norm``.
        weight_offset: added to the weight, in float32; 1 for Gemma.
        rounding: ``"torch"`` or ``"hf"``, see ``rms_norm``.
        dropout_p: probability with which an element of ``input`` is dropped; the others are scaled
            by ``1 / (1 - dropout_p)``. Dropped elements are 0 even if they were NaN or infinite.
        training: ``False`` turns dropout off.
        seed: int64 ``[2]``, the seed of the dropout mask; by default two numbers from torch's
            generator. A shard of a larger tensor needs more numbers (``_core/philox.py``).

    Returns:
        ``(normed, summed)``, the shape of ``input``, contiguous. ``summed`` has the dtype that
        ``residual + input`` has in torch, ``normed`` that of ``rms_norm(summed)``. Both are
        differentiable.

    Raises:
        ValueError: a shape or device does not fit, ``rounding`` is unknown, or ``dropout_p`` is
            outside [0, 1].
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); ``normed`` is computed from the rounded sum. On
        the CPU without dropout it has the bits of ``residual + input`` followed by torch's
        ``rms_norm`` or ``LlamaRMSNorm``, with the exceptions of ``rms_norm``. A row's result does
        not depend on the other rows; the weight's gradient is summed in a fixed order: the same
        bits for any number of threads. The dropout mask is drawn by a counter from a seed of
        torch's generator and never
        stored: the same in forward, backward, recomputation and on every backend. Saves
        ``summed``, ``weight``, one number per row and the seed; never ``input``. Backends: cpp,
        cuda, triton, torch. Under autocast: as ``rms_norm``.

    Reference:
        Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> import torch, fusedops
        >>> x, residual = torch.ones(1, 2), torch.tensor([[2.0, 3.0]])
        >>> fusedops.add_rms_norm(x, residual, (2,), eps=0.0)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    normalized_shape = plain_sizes(normalized_shape)
    if _residual.is_plain(input, residual, normalized_shape, dropout_p, training, seed):
        _norm_math.check_rms("add_rms_norm", weight_offset, rounding)
        eps = default_eps(residual, eps)
        plain = (weight, None, eps, weight_offset, rounding, 0.0, input.dtype)
        return _OP(input, residual, normalized_shape, *plain)[:2]
    dtype = _residual.check("add_rms_norm", input, residual, "dropout_p", dropout_p, training)
    source, stream = _residual.promote(input, residual, dtype)
    checked_eps = 0.0 if eps is None else eps
    checked = (stream, normalized_shape, weight, None, checked_eps)
    _norm_math.check("add_rms_norm", "the sum", *checked)
    _norm_math.check_rms("add_rms_norm", weight_offset, rounding)
    if stream.is_cuda and rounding == "torch" and torch.is_autocast_enabled("cuda"):
        # Autocast's work for all but `input`, which the kernels read in half precision.
        stream, weight = in_float32(stream), in_float32(weight)
    seed, p = _residual.draw_seed("add_rms_norm", source, dropout_p, training, seed)
    eps = default_eps(stream, eps)
    arguments = (source, stream, normalized_shape, weight, seed, eps, weight_offset, rounding, p)
    return _OP(*arguments, source.dtype)[:2]


def _check(*args: Any) -> None:
    input, residual = args[:2]
    normalized_shape, weight, _, eps, weight_offset, rounding, dropout_p, input_dtype = args[2:]
    if _residual.is_promoted(residual, input_dtype):
        return  # checked before
    _residual.check("add_rms_norm", input, residual, "dropout_p", dropout_p, True)
    _norm_math.check("add_rms_norm", "the sum", residual, normalized_shape, weight, None, eps)
    _norm_math.check_rms("add_rms_norm", weight_offset, rounding)


def _reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
    dropout_p: float,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    accumulation = dtypes.statistics_dtype(residual.dtype)
    added = philox.dropout(input.to(accumulation), seed, dropout_p)
    summed = (residual.to(accumulation) + added).to(residual.dtype).contiguous()
    normalized = normalize_rms(summed, normalized_shape, eps)
    normed = scale(normalized.values, weight, weight_offset, rounding, summed.dtype)
    return normed, summed, normalized.rstd.reshape(rows(summed, normalized_shape))


def _fake(
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leading = rows(residual, normalized_shape)
    statistics = dtypes.statistics_dtype(residual.dtype)
    normed = scaled_dtype(residual.dtype, weight, rounding)
    return (
        residual.new_empty(residual.shape, dtype=normed),
        residual.new_empty(residual.shape),
        residual.new_empty(leading, dtype=statistics),
    )


def _backward_reference(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_normed, grad_summed, summed, weight, _, seed = args[:6]
    normalized_shape, eps, weight_offset, _, dropout_p, input_dtype, output_mask = args[6:]
    # `summed` is an output, but not a constant: autograd knows how it depends on the inputs.
    accumulation = dtypes.statistics_dtype(summed.dtype)
    needed = needed_gradients(grad_normed, summed.dtype, dropout_p, input_dtype, output_mask)
    total = torch.zeros_like(summed, dtype=accumulation)
    grad_input = grad_residual = grad_weight = None
    if grad_normed is not None:
        grad = grad_normed.to(accumulation)
        normalized = normalize_rms(summed, normalized_shape, eps)
        parameter = summed.dtype if weight is None else weight.dtype
        if needed[0] or needed[1]:
            factor = offset(weight, weight_offset, accumulation)
            total = input_gradient(grad, normalized, factor, normalized_shape)
        if needed[2]:
            grad_weight = sum_rows(grad * normalized.values, normalized_shape).to(parameter)
    if grad_summed is not None:
        total = total + grad_summed.to(accumulation)
    if needed[0]:
        grad_input = philox.dropout(total, seed, dropout_p).to(input_dtype).contiguous()
    if needed[1]:
        grad_residual = total.to(summed.dtype).contiguous()
    return grad_input, grad_residual, grad_weight


def _backward_fake(
    grad_normed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    normalized_shape: Sequence[int],
    dropout_p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    needed = needed_gradients(grad_normed, summed.dtype, dropout_p, input_dtype, output_mask)
    parameter = summed.dtype if weight is None else weight.dtype
    return (
        summed.new_empty(summed.shape, dtype=input_dtype) if needed[0] else None,
        summed.new_empty(summed.shape) if needed[1] else None,
        summed.new_empty(normalized_shape, dtype=parameter) if needed[2] else None,
    )


def _shard(input: Any, normalized_shape: Sequence[int], weight: Any, seed: Any) -> list[Sharding]:
    options = where((weight, seed), (REPLICATE, REPLICATE))
    dims = counted_row_placements(input, normalized_shape, seed)
    return row_shardings(dims, [ROW] * 3, [ROW, ROW, None, *options, *[None] * 5])


def _shard_backward(*args: Any) -> list[Sharding]:
    """With rows sharded, each rank has a part of the sums that are the parameter gradients."""
    grad_normed, _, summed, *_, seed = tensors = args[:6]
    normalized_shape, *_, dropout_p, input_dtype, output_mask = args[6:]
    dtype = summed.tensor_meta.dtype
    needed = needed_gradients(grad_normed, dtype, dropout_p, input_dtype, output_mask)
    dims = counted_row_placements(summed, normalized_shape, seed)
    inputs = where(tensors, (ROW, ROW, ROW, REPLICATE, ROW, REPLICATE))
    return row_shardings(dims, where(needed, (ROW, ROW, ROW_SUM)), [*inputs, *[None] * 7])


_OP = define_op(
    "add_rms_norm",
    "(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, Tensor? seed,"
    " float eps, float weight_offset, str rounding, float dropout_p, ScalarType input_dtype)"
    " -> (Tensor normed, Tensor summed, Tensor rstd)",
    contract={
        "input": "input_dtype [*rows, *normalized_shape]",
        "residual": "param(input_dtype) as T [*rows, *normalized_shape]",
        "summed": "param(input_dtype) as T [*rows, *normalized_shape]",
        "normed": "param(T) [*rows, *normalized_shape]",
        "weight": "param(T) [*normalized_shape]",
        "rstd": "stat(T) [*rows]",
        "seed": "int64 [numbers]",
        "numbers": "numbers == 2 or numbers > 5",
        "normalized_shape": "len(normalized_shape) >= 1",
        "rounding": _norm_math.ROUNDINGS,
        "dropout_p": "0 <= dropout_p <= 1",
    },
    check=_check,
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "residual", "weight"),
        outputs=("normed", "summed"),
        saves=("summed", "weight", "rstd", "seed"),
        reference=_backward_reference,
        fake=_backward_fake,
        same={"input": "residual"},
    ),
    triton="fusedops.kernels.add_rms_norm",
    shard=_shard,
    shard_backward=_shard_backward,
)
