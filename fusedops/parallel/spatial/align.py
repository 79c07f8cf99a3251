"""Operands of one function brought to one partition: slices, moved rows, gathered dims.

A plain tensor that meets a cut one is sliced. Two tensors that are cut by the same axis at other
bounds are brought to those of the first: only the rows that change their owner are sent. Tensors
that are cut by different axes in one dim are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.halo import fetch_rows
from fusedops.parallel.spatial.partition import Axis, Cut, Partition, single, uncut
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import SpatialTensor, replicated, unwrap, wrap


def partition_of(x: Tensor) -> Partition:
    """Return the partition of any tensor; a plain one is not cut."""
    return x._partition if isinstance(x, SpatialTensor) else uncut(x.shape)


def move_bounds(local: Tensor, dim: int, cut: Cut, target: Cut) -> Tensor:
    """Return this rank's part at the bounds of another cut by the same axis."""
    if target.bounds == cut.bounds:
        return local
    return fetch_rows(local, dim, cut, single(target.spans()), label="move")


def _fetch_all(local: Tensor, dim: int, cut: Cut) -> Tensor:
    needs = single([(0, cut.size)] * cut.axis.size)
    return fetch_rows(local, dim, cut, needs, label="gather")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, cut: Cut) -> Tensor:
        ctx.dim, ctx.cut = dim, cut
        return _fetch_all(local, dim, cut)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return slice_dim(grad, ctx.dim, ctx.cut), None, None


def _gather_dim(local: Tensor, dim: int, cut: Cut, *, partial: bool = False) -> Tensor:
    """Return all rows of a dim on every rank.

    ``partial``: each rank uses the result for other outputs, so that gradients are added.
    """
    return _fetch_all(local, dim, cut) if partial else _Gather.apply(local, dim, cut)


def gathered(x: Any, dims: Iterable[int] | None = None) -> Any:
    """Return a tensor with dims (all by default) that are not cut."""
    if not isinstance(x, SpatialTensor):
        return x
    local, partition = unwrap(x), x._partition
    for dim in partition.cut_dims() if dims is None else dims:
        cut = partition.cuts[dim]
        if cut is not None:
            local = _gather_dim(local, dim, cut)
            partition = partition.replaced(dim, cut.size)
    return wrap(local, partition)


def slice_dim(local: Tensor, dim: int, cut: Cut) -> Tensor:
    """Return this rank's rows of a dim that is complete."""
    return local.narrow(dim, cut.own[0], cut.extent)


def _fit_dim(
    op: str, local: Tensor, dim: int, has: Cut | None, target: Cut | None, *, partial: bool = False
) -> Tensor:
    """Bring a dim of one operand to the cut ``target`` of another one of the same extent."""
    if target is None:
        return local if has is None else _gather_dim(local, dim, has, partial=partial)
    if has is None:
        return slice_dim(local, dim, target)
    if has.axis != target.axis:
        names = f"{has.axis.name!r} and {target.axis.name!r}"
        refuse(f"{op} of operands that the axes {names} cut in one dim")
    return move_bounds(local, dim, has, target)


def fit(op: str, x: Any, target: Partition, axes: Sequence[Axis] | None = None) -> Any:
    """Return an operand's part for a result of this partition; its size may broadcast.

    ``axes`` are those over which ranks compute different parts, so that gradients are added: by
    default those that cut the result.
    """
    if not isinstance(x, Tensor):
        return x
    has, axes = partition_of(x), target.axes if axes is None else axes
    local = replicated(unwrap(x), [axis for axis in axes if axis not in has.axes])
    for dim in range(-x.dim(), 0):
        is_broadcast = has.shape[dim] == 1 and target.shape[dim] != 1
        before, cut = has.cuts[dim], None if is_broadcast else target.cuts[dim]
        partial = before is not None and before.axis in axes
        local = _fit_dim(op, local, dim % x.dim(), before, cut, partial=partial)
    return local


def common(operands: Iterable[Partition]) -> Partition:
    """Return the partition of the result of a function that broadcasts."""
    partitions = list(operands)
    result = uncut(torch.broadcast_shapes(*[partition.shape for partition in partitions]))
    for dim in range(-len(result.shape), 0):
        candidates = [
            partition.cuts[dim]
            for partition in partitions
            if len(partition.shape) >= -dim and partition.shape[dim] == result.shape[dim]
        ]
        cut = next((cut for cut in candidates if cut is not None), None)
        if cut is not None and cut.axis in result.axes:
            refuse("a function of operands of which one mesh axis cuts different dims")
        result = result.replaced(dim, result.shape[dim], cut)
    return result
