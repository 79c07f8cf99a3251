"""A linear layer whose frozen weight is packed in 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.ops._quantized_weights import FORMATS, dequantize
from fusedops.ops.linear_act import bias_gradient, check_parameter

_NAME = "quantized_linear"


def quantized_linear(
    input: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    format: str = "int4",
    group: int = 128,
) -> torch.Tensor:
    """Apply a linear transformation whose weight is quantised and frozen.

    ``y = x W^T + b`` with ``W[n, k] = value(code[n, k]) * scale[n, k // group]``

    ``fusedops.nn.QuantizedLinear`` makes the packed weight, and ``fusedops.quantize`` replaces the
    linear layers of a model.

    Args:
        input: ``[..., in_features]``, any floating dtype, any strides.
        qweight: uint8 ``[ceil(out_features / 16), lines, 64]``: the packed codes, with
            ``ceil(in_features / 8)`` lines for 4 bits and ``ceil(in_features / 4)`` for 8.
        scales: ``[ceil(out_features / 16), groups, 16]``, float32, bfloat16 or float16; float64
            with an input of float64. ``groups`` is ``ceil(in_features / group)``.
        bias: ``[out_features]``, dtype of ``input``.
        out_features: size of the output's last dimension.
        format: ``"int8"`` (codes -127 to 127), ``"int4"`` (-8 to 7) or ``"nf4"`` (16 quantiles of
            a normal distribution).
        group: number of inputs that share a scale, a multiple of 8; 0: all inputs of an output.

    Returns:
        ``[..., out_features]``, dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, ``format`` is unknown, ``group`` is no multiple
            of 8, or ``scales`` requires a gradient.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64). The weight has no gradient; the
        gradients of input and bias are those of the dequantised weight. Half precision rounds the
        weight, or its codes, to the dtype of ``input``, so that the products use the units of
        bfloat16. On the CPU up to 32 rows read the packed weight in registers; more rows multiply
        by dequantised strips, whose sums are rounded in another order. Saves the packed weight
        alone. On a GPU the weight is dequantised by torch in every call. Under autocast input,
        scales and bias are cast.

    Reference:
        Dettmers et al.: QLoRA, arXiv:2305.14314.

    Example:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.QuantizedLinear.of(torch.nn.Linear(32, 8), format="int8")
        >>> x = torch.ones(2, 32)
        >>> y = fusedops.quantized_linear(
        ...     x, layer.qweight, layer.scales, layer.bias, out_features=8, format="int8"
        ... )
        >>> y.shape
        torch.Size([2, 8])
    """
    checks.tensor(_NAME, "input", input)
    if input.dim() == 0:
        checks.fail(_NAME, "input", "a tensor with at least one dimension", "a scalar")
    checks.index_tensor(_NAME, "qweight", qweight, dtypes=(torch.uint8,))
    checks.tensor(_NAME, "scales", scales)
    if bias is not None:
        check_parameter(_NAME, "bias", bias, input)
    checks.integer(_NAME, "out_features", out_features, least=0)
    checks.integer(_NAME, "group", group, least=0)
    checks.choice(_NAME, "format", format, FORMATS)
    if scales.requires_grad:
        checks.fail(_NAME, "scales", "frozen", "a tensor that requires a gradient")
    return OPERATOR(input, qweight, scales, bias, input.shape[-1], out_features, format, group)


def _weight(args: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    qweight, scales, in_features, out_features, format, group = args
    return dequantize(
        qweight,
        scales,
        in_features=in_features,
        out_features=out_features,
        format=format,
        group=group,
        dtype=dtype,
    )


def _reference(*args: Any) -> torch.Tensor:
    input, qweight, scales, bias, *others = args
    return F.linear(input, _weight((qweight, scales, *others), input.dtype), bias).contiguous()


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad, *weight, output_mask = args
    return (
        (grad @ _weight(tuple(weight), grad.dtype)).contiguous() if output_mask[0] else None,
        bias_gradient(grad) if output_mask[1] else None,
    )


def _shard(input: Any) -> list[Sharding]:
    """Shard the rows."""
    replicated = [REPLICATE] * 3
    return [([dim], [dim, *replicated]) for dim in (REPLICATE, *range(input.ndim - 1))]


def _shard_backward(grad_output: Any) -> list[Sharding]:
    rules: list[Sharding] = [([REPLICATE] * 2, [REPLICATE] * 3)]
    for dim in range(grad_output.ndim - 1):
        rules.append(([dim, PARTIAL], [dim, REPLICATE, REPLICATE]))
    return rules


OPERATOR = define_op(
    _NAME,
    "(Tensor input, Tensor qweight, Tensor scales, Tensor? bias, SymInt in_features,"
    " SymInt out_features, str format, int group) -> (Tensor output)",
    contract={
        "group": "group >= 0 and group % 8 == 0",
        "input": "T [*rows, in_features]",
        "depth": '4 if format == "int8" else 8',
        "blocks": "(out_features + 15) // 16",
        "size": "group if group > 0 else in_features",
        "groups": "(in_features + size - 1) // size if in_features > 0 else 0",
        "output": "T [*rows, out_features]",
        "qweight": "uint8 [blocks, (in_features + depth - 1) // depth, 64]",
        "scales": "mixed(T) [blocks, groups, 16]",
        "bias": "T [out_features]",
        "format": tuple(FORMATS),
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "bias"),
        outputs=("output",),
        saves=("qweight", "scales"),
        reference=_backward,
    ),
    autocast="lower",
    shard=_shard,
    shard_backward=_shard_backward,
)
