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

from fusedops._core import dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math, _residual
from fusedops.ops._norm_math import (
    default_eps,
    in_float32,
    norm_gradients,
    normalize_rms,
    offset,
    row_placements,
    rows,
    scale,
    scaled_dtype,
)


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
        torch's generator and never stored: the same in forward, backward, recomputation and on
        every backend. Saves ``summed``, ``weight``, one number per row and the seed; never
        ``input``. Backends: cpp, cuda, triton, torch. Under autocast: as ``rms_norm``.

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
    summed = _residual.add(input, residual, seed, dropout_p)
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
    *grads, summed, weight, _, seed = args[:6]
    normalized_shape, eps, weight_offset, _, *numbers = args[6:]

    def of_norm(grad: torch.Tensor, requested: Sequence[bool]) -> list[torch.Tensor | None]:
        normalized = normalize_rms(summed, normalized_shape, eps)
        factor = offset(weight, weight_offset, normalized.values.dtype)
        parameter = summed.dtype if weight is None else weight.dtype
        return norm_gradients(grad, normalized, factor, normalized_shape, parameter, requested)

    return _residual.backward(grads, summed, seed, numbers, of_norm)


def _shard(input: Any, normalized_shape: Sequence[int], seed: Any) -> list[Sharding]:
    dims = row_placements(input, normalized_shape, seed)
    return [([dim] * 3, [dim, dim, REPLICATE, REPLICATE]) for dim in dims]


def _shard_backward(summed: Any, normalized_shape: Sequence[int], seed: Any) -> list[Sharding]:
    return _residual.shard_backward(summed, normalized_shape, seed, 1)


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
        computed=_residual.computed_gradients,
        same={"input": "residual"},
    ),
    triton="fusedops.kernels.add_rms_norm",
    shard=_shard,
    shard_backward=_shard_backward,
)
