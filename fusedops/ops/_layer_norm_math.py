"""What layer_norm and add_layer_norm say alike: checks of the parameters, formulae, placements.

Formulae are differentiable torch operations in the accumulation dtype: they specify the kernels and
are the double backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.sharding import REPLICATE, Placement


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
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        checks.fail(
            op,
            "normalized_shape",
            f"the last sizes of {owner} (shape {list(input.shape)}), at least one",
            list(shape),
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            checks.parameter(op, name, parameter, owner, input)
            checks.shape(op, name, parameter, shape, "normalized_shape")
    checks.number(op, "eps", eps)


def rows(input: torch.Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the leading sizes, those of the rows' statistics."""
    return tuple(input.shape[: input.dim() - len(normalized_shape)])


@dataclass(frozen=True)
class Normalized:
    """Rows of mean 0 and deviation 1, and what made them so (with the reduced dims kept)."""

    values: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def normalize(input: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> Normalized:
    """Normalise the rows of ``input`` by a two-pass variance, in the accumulation dtype."""
    x = input.to(dtypes.statistics_dtype(input.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return Normalized(centred * rstd, mean, rstd)


def affine(
    values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``values * weight + bias`` in the dtype of ``values``."""
    if weight is not None:
        values = values * weight.to(values.dtype)
    return values if bias is None else values + bias.to(values.dtype)


def input_gradient(
    grad: torch.Tensor,
    normalized: Normalized,
    weight: torch.Tensor | None,
    normalized_shape: Sequence[int],
) -> torch.Tensor:
    """Return ``rstd * (h - mean(h) - xhat * mean(h * xhat))`` with ``h = grad * weight``."""
    dims = tuple(range(-len(normalized_shape), 0))
    scaled = affine(grad, weight, None)
    along = (scaled * normalized.values).mean(dims, keepdim=True)
    centred = scaled - scaled.mean(dims, keepdim=True) - normalized.values * along
    return centred * normalized.rstd


def sum_rows(values: torch.Tensor, normalized_shape: Sequence[int]) -> torch.Tensor:
    """Return the sum over the leading dims: a parameter's gradient."""
    dims = tuple(range(values.dim() - len(normalized_shape)))
    return values.sum(dims) if dims else values.clone()


def row_placements(input: Any, normalized_shape: Sequence[int]) -> list[Placement]:
    """Return how ``input`` may lie on a mesh: rows are independent, a row stays whole."""
    return [REPLICATE, *range(input.ndim - len(normalized_shape))]
