"""Operands of one function brought to one partition: slices, moved rows, gathered dims.

A plain tensor that meets a cut one is sliced. Two tensors that are cut by the same axis at other
bounds are brought to those of the first: only the rows that change their owner are sent. Tensors
that are cut by different axes in one dim are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.halo import fetch_rows
from fusedops.parallel.spatial.partition import (
    Cut,
    Factor,
    Factors,
    Partition,
    cuts,
    extent,
    plain,
    simplified,
    single,
)
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    replicated,
    unsupported,
    unwrap,
    wrap,
)


def partition_of(x: Tensor) -> Partition:
    """Return the partition of any tensor; a plain one is not cut."""
    if isinstance(x, SpatialTensor):
        return x._partition
    return Partition(tuple(plain(size) for size in x.shape))


def move_bounds(local: Tensor, dim: int, cut: Cut, bounds: Sequence[int]) -> tuple[Tensor, Cut]:
    """Cut a plain dim at other bounds; returns the part and its cut."""
    moved = cut.moved(bounds)
    if tuple(bounds) == cut.bounds:
        return local, cut
    return fetch_rows(local, dim, cut, single(moved.spans()), label="move"), moved


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, cut: Cut) -> Tensor:
        ctx.dim, ctx.cut = dim, cut
        everything = tuple(((0, cut.size),) if cut.size else () for _ in cut.spans())
        return fetch_rows(local, dim, cut, everything, label="gather")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start, stop = ctx.cut.own
        return grad.narrow(ctx.dim, start, stop - start), None, None


def gather_dim(local: Tensor, dim: int, factors: Factors, *, partial: bool = False) -> Tensor:
    """Return all rows of a dim on every rank.

    Args:
        local: this rank's part.
        dim: of it.
        factors: of the dim.
        partial: whether each rank uses the result for other outputs, so that gradients are added.
    """
    for place, factor in enumerate(factors):
        if factor.cut is None:
            continue
        sizes = [
            later.size if index < place else later.extent for index, later in enumerate(factors)
        ]
        split = local.unflatten(dim, sizes) if len(sizes) > 1 else local
        if partial:
            everything = tuple(
                ((0, factor.size),) if factor.size else () for _ in factor.cut.spans()
            )
            split = fetch_rows(split, dim + place, factor.cut, everything, label="gather")
        else:
            split = _Gather.apply(split, dim + place, factor.cut)
        local = split.flatten(dim, dim + len(sizes) - 1) if len(sizes) > 1 else split
    return local


def gathered(x: Any, dims: Sequence[int] | None = None) -> Any:
    """Return a tensor with dims (all by default) that are not cut."""
    if not isinstance(x, SpatialTensor):
        return x
    local, partition = unwrap(x), x._partition
    for dim in partition.cut_dims() if dims is None else dims:
        local = gather_dim(local, dim, partition.dims[dim])
        partition = partition.replaced(dim, Factor(partition.shape[dim]))
    return wrap(local, partition)


def slice_dim(local: Tensor, dim: int, factors: Factors) -> Tensor:
    """Return this rank's part of a dim that is complete."""
    if not cuts(factors):
        return local
    if len(factors) == 1:
        start, stop = cuts(factors)[0].own
        return local.narrow(dim, start, stop - start)
    split = local.unflatten(dim, [factor.size for factor in factors])
    for place, factor in enumerate(factors):
        if factor.cut is not None:
            start, stop = factor.cut.own
            split = split.narrow(dim + place, start, stop - start)
    return split.flatten(dim, dim + len(factors) - 1)


def fit_dim(op: str, local: Tensor, dim: int, has: Factors, target: Factors) -> Tensor:
    """Bring a dim of one operand to the factors of another one of the same extent."""
    if has == target:
        return local
    if not cuts(has):
        return slice_dim(local, dim, target)
    has, target = _refined(has, target), _refined(target, has)
    alike = [factor.size for factor in has] == [factor.size for factor in target]
    pairs = list(zip(has, target, strict=True)) if alike else []
    if not alike or any(a.cut and b.cut and a.cut.axis != b.cut.axis for a, b in pairs):
        unsupported(
            f"the operands of {op} are cut differently in one dim ({_shown(has)} and "
            f"{_shown(target)}); spatial.gather one of them, or scatter both with the same dims"
        )
    split = local.unflatten(dim, [factor.extent for factor in has]) if len(has) > 1 else local
    for place, (mine, other) in enumerate(pairs):
        here = dim + place
        if mine.cut is not None and other.cut is not None:
            split, _ = move_bounds(split, here, mine.cut, other.cut.bounds)
        elif mine.cut is not None:
            split = gather_dim(split, here, (mine,))
        else:
            split = slice_dim(split, here, (other,))
    return split.flatten(dim, dim + len(has) - 1) if len(has) > 1 else split


def _refined(factors: Factors, other: Factors) -> Factors:
    """Split a single cut factor as another list of factors does, where its bounds allow it."""
    if len(factors) != 1 or len(other) == 1 or factors[0].cut is None:
        return factors
    outer, cut = other[0].size, factors[0].cut
    inner = math.prod(factor.size for factor in other[1:])
    if any(bound % inner for bound in cut.bounds):
        return factors
    bounds = [bound // inner for bound in cut.bounds]
    return (Factor(outer, cut.moved(bounds)), Factor(inner))


def _shown(factors: Factors) -> str:
    return " x ".join(
        f"{factor.size} by {factor.cut.axis.name}" if factor.cut else str(factor.size)
        for factor in factors
    )


def fit(op: str, x: Any, target: Partition) -> Any:
    """Return an operand's part for a result of this partition; its size may broadcast."""
    if not isinstance(x, Tensor):
        return x
    has, local = partition_of(x), unwrap(x)
    offset = len(target.dims) - len(has.dims)
    axes = [axis for axis in target.axes if axis not in has.axes]
    local = replicated(local, axes)
    for dim, factors in enumerate(has.dims):
        size = has.shape[dim]
        expected = target.dims[dim + offset]
        if size == 1 and (target.shape[dim + offset] != 1 or not cuts(expected)):
            local = gather_dim(local, dim, factors, partial=True) if cuts(factors) else local
            continue
        local = fit_dim(op, local, dim, factors, expected)
    return local


def common(tensors: Sequence[Any]) -> Partition:
    """Return the partition of the result of a function that broadcasts."""
    parts = [partition_of(x) for x in tensors if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*[part.shape for part in parts])
    dims: list[Factors] = []
    used: set[Any] = set()
    for place in range(-len(shape), 0):
        candidates = [
            part.dims[place]
            for part in parts
            if len(part.dims) >= -place and part.shape[place] == shape[place]
        ]
        cut = [factors for factors in candidates if cuts(factors)]
        factors = cut[0] if cut else plain(shape[place])
        if any(one.axis in used for one in cuts(factors)):
            unsupported("one mesh axis cuts different dims of the operands; gather one of them")
        used.update(one.axis for one in cuts(factors))
        dims.append(factors)
    return Partition(tuple(dims))


def split_factor(factors: Factors, sizes: Sequence[int], local: Tensor, dim: int) -> Any:
    """Split a dim into several of these sizes, moving bounds that do not fit.

    Returns:
        The part with the dims in place of the one, and the factors of each.
    """
    result: list[Factors] = []
    pending = list(factors)
    shape: list[int] = []
    split = local.unflatten(dim, [f.extent for f in pending]) if len(pending) > 1 else local
    place = dim
    for size in sizes:
        group: list[Factor] = []
        left = size
        while left > 1:
            factor = pending[0] if pending else Factor(1)
            if left % factor.size == 0 and factor.size <= left and factor.size > 0:
                pending.pop(0)
                group.append(factor)
                left //= factor.size
                place += 1
                continue
            if factor.size % left:
                unsupported(
                    f"a view of {_shown(factors)} as {list(sizes)} separates rows of a cut dim; "
                    "spatial.gather the tensor before it"
                )
            inner = factor.size // left
            outer: Factor
            if factor.cut is None:
                outer = Factor(left)
            else:
                bounds = [bound // inner for bound in factor.cut.bounds]
                if any(bound % inner for bound in factor.cut.bounds):
                    bounds = list(factor.cut.resized(left).bounds)
                    moved = [bound * inner for bound in bounds]
                    split, _ = move_bounds(split, place, factor.cut, moved)
                outer = Factor(left, factor.cut.moved(bounds))
            split = split.unflatten(place, (outer.extent, inner))
            place += 1
            pending[0] = Factor(inner)
            group.append(outer)
            left = 1
        result.append(simplified(group))
        shape.append(extent(tuple(group)))
    return split, result, shape
