"""What code that writes attention out has recorded so far, and the one call of the op that it is.

A plan holds the queries and keys, the scale, what is added to the scores, which scores count, and
the dropout. Code regroups the leading dims of its scores (``[batch * heads]``, then
``[batch, heads]`` for a mask, windows between them), so each bias and mask has the leading dims for
which it was written. The op runs on the finest of these groupings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from fusedops._core import dtypes, philox
from fusedops.ops import _attention_math
from fusedops.ops.attention import attention


class WeightDropout:
    """Dropout of the weights: the op and code that computes the weights later drop the same."""

    def __init__(self, probability: float) -> None:
        self.probability = probability
        self.seed: torch.Tensor | None = None  # set when the op has run

    def factors(self, weights: torch.Tensor) -> torch.Tensor | None:
        """Return what the op multiplied the weights by, ``None`` if it has not run."""
        if self.seed is None:
            return None
        shape = tuple(weights.shape)
        factors = _attention_math.keep_factors(shape, self.seed, self.probability, weights)
        return None if factors is None else factors.to(weights.dtype)


class Input(NamedTuple):
    """A tensor that the scores are made of."""

    tensor: torch.Tensor
    lead: tuple[int, ...]  # the leading dims of the scores for which it was written
    version: int  # of its contents at that time


def input_of(tensor: torch.Tensor, lead: Sequence[int]) -> Input:
    """Return a tensor as an input of scores whose leading dims are ``lead``."""
    return Input(tensor, tuple(lead), _version(tensor))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class AttentionPlan(NamedTuple):
    """Attention up to a point of the code.

    Attributes:
        query: ``[*lead, Sq, D]``.
        key: ``[*lead, Sk, D]``.
        lead: the leading dims that the scores have in the code now.
        scale: factor of the products.
        biases: are added to the scaled products; broadcastable to ``[*lead, Sq, Sk]``.
        allowed: booleans, all of which must be true for a score to count.
        dropout: of the weights.
        is_normalised: whether the softmax has been taken.
    """

    query: Input
    key: Input
    lead: tuple[int, ...]
    scale: float = 1.0
    biases: tuple[Input, ...] = ()
    allowed: tuple[Input, ...] = ()
    dropout: WeightDropout | None = None
    is_normalised: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return *self.lead, self.query.tensor.shape[-2], self.key.tensor.shape[-2]

    def check_unchanged(self) -> None:
        """Raise if code has written to a tensor that is still to be read.

        Raises:
            RuntimeError: it has.
        """
        for tensor, _, version in (self.query, self.key, *self.biases, *self.allowed):
            if _version(tensor) != version:
                raise RuntimeError(
                    "fusedops.patch: the code writes to an input of its attention between the "
                    "scores and their use; patch this model at level O2"
                )

    def scaled(self, factor: float) -> AttentionPlan | None:
        """Return the plan of the scores times a number, ``None`` if a mask forbids that."""
        if not math.isfinite(factor) or (factor <= 0.0 and self.allowed):
            return None
        biases = tuple(input_of(bias * factor, lead) for bias, lead, _ in self.biases)
        return self._replace(scale=self.scale * factor, biases=biases)

    def scaled_rows(self, factor: torch.Tensor, *, divides: bool) -> AttentionPlan | None:
        """Return the plan of the scores times or through a tensor that has a number for each row.

        Args:
            factor: broadcastable to ``[*lead, Sq, 1]``.
            divides: whether the scores are divided by it.
        """
        query, lead, _ = self.query
        own = factor.dim() == 0 or (lead == self.lead and factor.shape[-1] == 1)
        if not own or self.biases or self.allowed:
            return None
        scaled = query / factor if divides else query * factor
        return self._replace(query=input_of(scaled.to(query.dtype), lead))

    def biased(self, bias: torch.Tensor) -> AttentionPlan | None:
        """Return the plan of the scores plus a tensor, ``None`` if that has another shape."""
        if not bias.is_floating_point() or not fits(bias, self.shape):
            return None
        return self._replace(biases=(*self.biases, input_of(bias, self.lead)))

    def restricted(self, allowed: torch.Tensor) -> AttentionPlan | None:
        """Return the plan of the scores of which only ``allowed`` count."""
        if allowed.dtype != torch.bool or not fits(allowed, self.shape):
            return None
        return self._replace(allowed=(*self.allowed, input_of(allowed, self.lead)))

    def regrouped(self, shape: Sequence[int]) -> AttentionPlan | None:
        """Return the plan of the scores in another shape; rows and columns must stay."""
        if len(shape) < 3 or tuple(shape[-2:]) != self.shape[-2:]:
            return None
        return self._replace(lead=tuple(shape[:-2]))


def fits(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor broadcasts to ``shape``."""
    return tensor.dim() <= len(shape) and all(
        size in (1, full)
        for size, full in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )


def attend(plan: AttentionPlan, value: torch.Tensor) -> torch.Tensor | None:
    """Return the plan's weights times ``value`` by one call of the op.

    Args:
        plan: with the softmax taken.
        value: ``[..., Sk, Dv]``, whose leading dims broadcast to the plan's.

    Returns:
        ``[*lead, Sq, Dv]``, contiguous as torch's product; ``None`` where the groupings of the
        leading dims do not fit each other.
    """
    grid = _grid(plan)
    if grid is None:
        return None
    plan.check_unchanged()
    rows, columns = plan.shape[-2:]
    query, key, dtype = plan.query.tensor, plan.key.tensor, value.dtype
    if value.shape[:-2] != plan.lead:
        if not fits(value[..., :1, :1], (*plan.lead, 1, 1)):
            return None
        value = value.expand(*plan.lead, columns, value.shape[-1])
    if query.shape[:-2] != grid:
        query, key = (part.reshape(*grid, *part.shape[-2:]) for part in (query, key))
    if plan.lead != grid:
        value = value.reshape(*grid, columns, value.shape[-1])
    has_autocast = dtypes.autocast_dtype(value.device) is not None
    if not has_autocast and query.dtype != dtype:
        # Code computes scores in float32 for values in half precision.
        wide = torch.promote_types(query.dtype, dtype)
        query, key, value = (tensor.to(wide) for tensor in (query, key, value))
    probability, seed = 0.0, None
    if plan.dropout is not None:
        probability = plan.dropout.probability
        seed = plan.dropout.seed = philox.new_seed(query.device)
    output = attention(
        query, key, value, _mask(plan, grid), probability, scale=plan.scale, seed=seed
    )
    if not has_autocast and output.dtype != dtype:
        output = output.to(dtype)
    # Contiguous: code that views torch's product must be able to view this one.
    output = output.contiguous()
    return output if plan.lead == grid else output.view(*plan.lead, rows, output.shape[-1])


def _grid(plan: AttentionPlan) -> tuple[int, ...] | None:
    """Return the finest of the groupings of the leading dims, ``None`` if two do not fit."""
    grid = tuple(plan.query.lead)
    masks = (part for part in (*plan.biases, *plan.allowed) if _has_lead(part.tensor))
    for lead in (plan.lead, *(part.lead for part in masks)):
        if lead == grid:
            continue
        if _groups(grid, lead) is not None:
            grid = lead
        elif _groups(lead, grid) is None:
            return None
    return grid


def _has_lead(tensor: torch.Tensor) -> bool:
    return any(size != 1 for size in tensor.shape[:-2])


def _groups(coarse: Sequence[int], fine: Sequence[int]) -> list[list[int]] | None:
    """Return into which dims of ``fine`` each dim of ``coarse`` splits, ``None`` if it does not."""
    groups: list[list[int]] = []
    rest = list(fine)
    for size in coarse:
        group: list[int] = []
        while rest and (not group or math.prod(group) < size):
            group.append(rest.pop(0))
        if not group or math.prod(group) != size:
            return None
        groups.append(group)
    if any(size != 1 for size in rest) or (rest and not groups):
        return None
    if rest:
        groups[-1] += rest
    return groups


def _on_grid(part: Input, grid: tuple[int, ...]) -> torch.Tensor:
    """Return a bias or mask in a shape that broadcasts to ``[*grid, Sq, Sk]``."""
    tensor, lead, _ = part
    if lead == grid or tensor.dim() < 2:
        return tensor
    if not _has_lead(tensor):
        return tensor.reshape(tensor.shape[-2:])
    padded = tensor[(None,) * (len(lead) + 2 - tensor.dim())]
    groups = _groups(lead, grid)
    assert groups is not None
    sizes: list[int] = []
    for size, group in zip(padded.shape, groups, strict=False):
        sizes += group if size != 1 else [1] * len(group)
    return padded.reshape(*sizes, *padded.shape[-2:])


def _mask(plan: AttentionPlan, grid: tuple[int, ...]) -> torch.Tensor | None:
    """Return the op's mask: the sum of the biases where all masks allow it."""
    biases = [_on_grid(part, grid) for part in plan.biases]
    masks = [_on_grid(part, grid) for part in plan.allowed]
    bias = reduce(torch.add, biases) if biases else None
    allowed = reduce(torch.logical_and, masks) if masks else None
    if bias is None or allowed is None:
        return allowed if bias is None else bias
    return torch.where(allowed, bias, -math.inf)
