"""Root-mean-square normalisation: each row to mean square 1, then scale.

    y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)

over the last dimensions, as ``torch.nn.functional.rms_norm``. The rounding is an argument, because
models differ in it in half precision. Kernels: ``csrc/cpu/norm/norm.*``, ``csrc/cuda/norm.*``,
``kernels/rms_norm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math
from fusedops.ops._norm_math import (
    default_eps,
    norm_gradients,
    normalize_rms,
    offset,
    row_placements,
    rows,
    scale,
    scaled_dtype,
)

ROUNDINGS = _norm_math.ROUNDINGS


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "torch",
) -> torch.Tensor:
    """Divide by the root mean square over the last ``len(normalized_shape)`` dimensions.

    ``y = x / sqrt(E[x^2] + eps) * (weight + weight_offset)``

    Args:
        input: ``[..., *normalized_shape]``, any floating dtype, any strides.
        normalized_shape: sizes of the trailing dimensions.
        weight: ``normalized_shape``, dtype of ``input`` (float32 is also accepted if that is a
            half-precision dtype).
        eps: added to the mean square; ``None`` is, as in torch, the ``eps`` of float32 (of float64
            for float64).
        weight_offset: added to the weight, in float32; 1 if a model stores ``weight - 1`` (Gemma).
            It does not apply without a weight.
        rounding: ``"torch"`` rounds once, at the end (also Gemma's); ``"hf"`` rounds the normalised
            row to the dtype of ``input`` and then multiplies (Llama, Qwen, Mistral; T5 where weight
            and input have one dtype). The two differ in half precision only.

    Returns:
        Shape and dtype of ``input``, contiguous. With ``"hf"`` and a float32 weight and a
        half-precision input the dtype is float32, to which torch promotes their product.

    Raises:
        ValueError: a shape or device does not fit, or ``rounding`` is unknown.
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64). On the CPU, for a contiguous input, the result
        has the bits of ``torch.nn.functional.rms_norm``, or with ``"hf"`` those of
        ``LlamaRMSNorm``: the roundings are the same, and squares are summed in torch's order. Two
        cases differ in the last place: a single row of 32768 elements or more, whose sum torch
        divides by the number of threads; and results below 1.2e-38, which the bfloat16 kernels
        treat as zero. On a GPU the roundings are the same, the order of the sum is not. A row's
        result does not depend on the other rows; the weight's gradient is summed in a fixed order:
        the same bits for any number of threads. Saves ``input``, ``weight`` and one number per row.
        Backends: cpp, cuda, triton, torch. Under autocast on CUDA, ``"torch"`` computes in float32
        as torch's does and ``"hf"`` keeps the dtypes as the models do; unchanged on the CPU.

    Reference:
        Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> import torch, fusedops
        >>> fusedops.rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), (4,), eps=0.0)
        tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """
    normalized_shape = plain_sizes(normalized_shape)
    _check(input, normalized_shape, weight, eps, weight_offset, rounding)
    eps = default_eps(input, eps)
    return _OP(input, normalized_shape, weight, eps, weight_offset, rounding)[0]


def _check(
    input: Any, normalized_shape: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any
) -> None:
    checks.tensor("rms_norm", "input", input)
    eps = 0.0 if eps is None else eps
    _norm_math.check("rms_norm", "input", input, normalized_shape, weight, None, eps)
    _norm_math.check_rms("rms_norm", weight_offset, rounding)


def _reference(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    normalized = normalize_rms(input, normalized_shape, eps)
    output = scale(normalized.values, weight, weight_offset, rounding, input.dtype)
    return output.contiguous(), normalized.rstd.reshape(rows(input, normalized_shape))


def _fake(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    statistics = dtypes.statistics_dtype(input.dtype)
    return (
        input.new_empty(input.shape, dtype=scaled_dtype(input.dtype, weight, rounding)),
        input.new_empty(rows(input, normalized_shape), dtype=statistics),
    )


def _backward_reference(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, weight, _, normalized_shape, eps, weight_offset, _, output_mask = args
    normalized = normalize_rms(input, normalized_shape, eps)
    factor = offset(weight, weight_offset, normalized.values.dtype)
    parameter = input.dtype if weight is None else weight.dtype
    grad_input, grad_weight = norm_gradients(
        grad_output, normalized, factor, normalized_shape, parameter, output_mask
    )
    if grad_input is not None:
        grad_input = grad_input.to(input.dtype).contiguous()
    return grad_input, grad_weight


def _shard(input: Any, normalized_shape: Sequence[int]) -> list[Sharding]:
    """Rows are independent: any leading dim may be sharded, the weight is replicated."""
    dims = row_placements(input, normalized_shape)
    return [([dim] * 2, [dim, REPLICATE]) for dim in dims]


_OP = define_op(
    "rms_norm",
    "(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps, float weight_offset,"
    " str rounding) -> (Tensor output, Tensor rstd)",
    contract={
        "input": "T [*rows, *normalized_shape]",
        "output": "param(T) [*rows, *normalized_shape]",
        "weight": "param(T) [*normalized_shape]",
        "rstd": "stat(T) [*rows]",
        "normalized_shape": "len(normalized_shape) >= 1",
        "rounding": _norm_math.ROUNDINGS,
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "weight"),
        outputs=("output",),
        saves=("input", "weight", "rstd"),
        reference=_backward_reference,
    ),
    autocast="norm",
    triton="fusedops.kernels.rms_norm",
    shard=_shard,
)
