"""Shared checks, reference formulas and placements of the norms.

Formulas are differentiable torch operations in the accumulation dtype: they specify the kernels and
are the double backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.sharding import REPLICATE, Placement
from fusedops.kernels._norm_arguments import scaled_dtype

# Roundings of an RMS norm in half precision: "torch" rounds once, at the end; "hf" rounds the
# normalised row, then multiplies in the promoted dtype of row and weight (LlamaRMSNorm).
ROUNDINGS = ("torch", "hf")


# The default eps by the input's dtype; ``torch.finfo`` at each call would take 0.4 us.
_EPS = {
    dtype: torch.finfo(dtypes.statistics_dtype(dtype)).eps
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


def check(
    op: str,
    owner: str,
    input: torch.Tensor,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    eps: Any,
) -> None:
    """Raise unless rows of ``input`` can be normalised; ``owner`` is what messages call it."""
    shape = checks.sizes(op, "normalized_shape", normalized_shape)
    if not _ends_in(input.shape, shape):
        expected = f"the last sizes of {owner} (shape {list(input.shape)}), at least one"
        checks.fail(op, "normalized_shape", expected, list(shape))
    dtype, device = input.dtype, input.device
    if weight is not None and not (checks.alike(weight, dtype, device) and weight.shape == shape):
        checks.parameter(op, "weight", weight, owner, input)
        checks.shape(op, "weight", weight, shape, "normalized_shape")
    if bias is not None and not (checks.alike(bias, dtype, device) and bias.shape == shape):
        checks.parameter(op, "bias", bias, owner, input)
        checks.shape(op, "bias", bias, shape, "normalized_shape")
    if not isinstance(eps, float):
        checks.number(op, "eps", eps)


def _ends_in(sizes: torch.Size, shape: tuple[Any, ...]) -> bool:
    """Return whether ``shape`` is the last of ``sizes``; a slice of them would cost 0.3 us."""
    if len(shape) == 1:
        return len(sizes) > 0 and bool(sizes[-1] == shape[0])
    return len(shape) > 0 and sizes[-len(shape) :] == shape


def in_float32(tensor: Any) -> Any:
    """Return a half-precision tensor in float32: autocast's work, where an op does it itself."""
    half = tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if half else tensor


def rows(input: torch.Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(input.shape[: input.dim() - len(normalized_shape)])


def check_rms(op: str, weight_offset: Any, rounding: Any) -> None:
    if type(weight_offset) is not float or weight_offset != 0.0:
        checks.finite(op, "weight_offset", weight_offset)
    checks.choice(op, "rounding", rounding, ROUNDINGS)


@dataclass(frozen=True)
class Normalized:
    """Rows of deviation 1, and what made them so (with the reduced dims kept).

    Where rows were not ``centred``, their mean square is 1, and ``mean`` is 0.
    """

    values: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    centred: bool = True


def normalize(input: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> Normalized:
    """Normalise the rows of ``input`` by a two-pass variance, in the accumulation dtype."""
    x = input.to(dtypes.statistics_dtype(input.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    # Where the mean is much larger than the deviations its rounding would count.
    centred = centred - centred.mean(dims, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return Normalized(centred * rstd, mean, rstd)


def normalize_rms(input: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> Normalized:
    """Divide the rows of ``input`` by their root mean square, rounding as torch and HF do."""
    x = input.to(dtypes.statistics_dtype(input.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)
    return Normalized(x * rstd, torch.zeros_like(rstd), rstd, centred=False)


def default_eps(input: torch.Tensor, eps: float | None) -> float:
    """Return what torch's rms_norm takes for ``eps=None``: that of the accumulation dtype."""
    # Of any other dtype the contract tells.
    return _EPS.get(input.dtype, 0.0) if eps is None else eps


def scale(values: torch.Tensor, call: SimpleNamespace, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values * (weight + weight_offset) + bias`` in the dtype of a norm of ``dtype``."""
    if call.rounding == "hf":
        values = values.to(dtype).to(values.dtype)
    weight = offset(call.weight, call.weight_offset, values.dtype)
    return affine(values, weight, call.bias).to(scaled_dtype(dtype, call.weight, call.rounding))


def offset(
    weight: torch.Tensor | None, weight_offset: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return ``weight + weight_offset`` in ``dtype``; an absent weight has no offset."""
    if weight is None or weight_offset == 0.0:
        return weight
    return weight.to(dtype) + weight_offset


def affine(
    values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    if weight is not None:
        values = values * weight.to(values.dtype)
    return values if bias is None else values + bias.to(values.dtype)


def input_gradient(
    grad: torch.Tensor,
    normalized: Normalized,
    weight: torch.Tensor | None,
    normalized_shape: Sequence[int],
) -> torch.Tensor:
    """Return ``rstd * (h - mean(h) - xhat * mean(h * xhat))`` with ``h = grad * weight``.

    The term ``mean(h)`` is that of the mean: rows that were not centred have none.
    """
    dims = tuple(range(-len(normalized_shape), 0))
    scaled = affine(grad, weight, None)
    along = (scaled * normalized.values).mean(dims, keepdim=True)
    across = scaled.mean(dims, keepdim=True) if normalized.centred else 0.0
    return (scaled - across - normalized.values * along) * normalized.rstd


def norm_gradients(
    grad_normed: torch.Tensor,
    normalized: Normalized,
    weight: torch.Tensor | None,
    normalized_shape: Sequence[int],
    parameter: torch.dtype,
    requested: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Return the gradients of the rows, not rounded, and of weight and bias, if ``requested``.

    Those of weight and bias have the dtype ``parameter``.
    """
    grad = grad_normed.to(normalized.values.dtype)
    gradients: list[torch.Tensor | None] = [None] * len(requested)
    if requested[0]:
        gradients[0] = input_gradient(grad, normalized, weight, normalized_shape)
    if requested[1]:
        gradients[1] = _sum_rows(grad * normalized.values, normalized_shape).to(parameter)
    if any(requested[2:]):
        gradients[2] = _sum_rows(grad, normalized_shape).to(parameter)
    return gradients


def _sum_rows(values: torch.Tensor, normalized_shape: Sequence[int]) -> torch.Tensor:
    """Return the sum over the leading dims: a parameter's gradient."""
    dims = tuple(range(values.dim() - len(normalized_shape)))
    return values.sum(dims) if dims else values.clone()


def row_placements(
    input: Any, normalized_shape: Sequence[int], seed: Any = None
) -> list[Placement]:
    """Return the shardings of ``input``: rows are independent, a row is not sharded.

    Nothing is sharded where dropout, with a seed, counts elements from the tensor's beginning.
    """
    return [REPLICATE, *(range(input.ndim - len(normalized_shape)) if seed is None else ())]
