"""Views, permutations, slices and concatenations: mostly arithmetic on the partition.

A view that merges dims keeps the cut of the first one and gathers the others. One that splits a cut
dim needs bounds at multiples of the inner size; rows move where they are not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.align import common, fit, gathered, move_bounds, partition_of
from fusedops.parallel.spatial.halo import fetch_rows
from fusedops.parallel.spatial.partition import Cut, Partition, single
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    replicated,
    rule,
    unwrap,
    wrap,
)


def _sizes(args: Sequence[Any]) -> list[int]:
    if len(args) == 1 and not isinstance(args[0], int):
        return [int(size) for size in args[0]]
    return [int(size) for size in args]


@rule("view", "reshape", "view_as", "reshape_as", "_unsafe_view")
def _view(func: Any, input: Any, *args: Any, shape: Any = None) -> Any:
    if args and isinstance(args[0], torch.dtype):
        refuse("view of another dtype")
    if args and isinstance(args[0], Tensor):
        args = (args[0].shape,)
    sizes = _sizes(args if shape is None else (shape,))
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = input.numel() // known if known else 0
    if math.prod(sizes) != input.numel():
        raise RuntimeError(f"shape '{sizes}' is invalid for input of size {input.numel()}")
    return viewed(input, sizes)


def viewed(x: Any, sizes: list[int]) -> Any:
    """Return a SpatialTensor in another global shape of as many elements."""
    shape = x.shape
    result: list[Cut | None] = [None] * len(sizes)
    for source, target in _groups(x.shape, sizes):
        dims = [dim for dim in source if isinstance(x, SpatialTensor) and x._partition.is_cut(dim)]
        if not dims:
            continue
        lead = next((dim for dim in source if shape[dim] != 1), None)
        if dims[0] != lead and lead == 0:
            refuse("a view that merges the batch with a cut dim")
        x = gathered(x, [dim for dim in dims if dim != lead])
        if dims[0] != lead:
            continue
        place = next(dim for dim in target if sizes[dim] != 1)
        inner = math.prod(shape[dim] for dim in source if dim > lead)
        x, result[place] = _split_dim(x, lead, inner, sizes[place])
    partition = Partition(tuple(sizes), tuple(result))
    return wrap(unwrap(x).reshape(partition.local_shape), partition)


def _groups(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Return the dims of two shapes that have the same elements, in as small groups as possible."""
    source: list[int] = []
    target: list[int] = []
    first = place = 0
    while first < len(shape) or place < len(sizes):
        have = math.prod(shape[dim] for dim in source)
        need = math.prod(sizes[dim] for dim in target)
        if source and target and have == need:
            yield source, target
            source, target = [], []
        elif first < len(shape) and (not source or have < need or place == len(sizes)):
            source = [*source, first]
            first += 1
        else:
            target = [*target, place]
            place += 1
    yield source, target


def _split_dim(x: Any, dim: int, inner: int, size: int) -> tuple[Any, Cut]:
    """Return the tensor, and the cut of a dim of ``size`` rows that replaces a cut dim.

    A row of the result may have several rows of the dim, or a part of one: each row of the dim has
    ``inner`` elements that the view merges with it.
    """
    cut = x._partition.cuts[dim]
    target = cut.size * inner // max(1, size)  # elements behind each row of the result
    if inner % max(1, target) == 0:
        return x, cut.with_bounds(bound * inner // max(1, target) for bound in cut.bounds)
    if target % inner:
        refuse("a view that separates rows of a cut dim")
    rows = target // inner
    if any(bound % rows for bound in cut.bounds):
        moved = cut.with_bounds(bound * rows for bound in cut.resized(size).bounds)
        local = move_bounds(unwrap(x), dim, cut, moved)
        cut, x = moved, wrap(local, x._partition.replaced(dim, cut.size, moved))
    return x, cut.with_bounds(bound // rows for bound in cut.bounds)


@rule("flatten")
def _flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % input.dim(), end_dim % input.dim()
    shape = list(input.shape)
    return input.view(*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


@rule("unflatten")
def _unflatten(func: Any, input: Any, dim: int, sizes: Any, *_: Any) -> Any:
    dim, shape = dim % input.dim(), input.shape
    return input.view(*shape[:dim], *sizes, *shape[dim + 1 :])


@rule("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT")
def _permute(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    args = (*args, *kwargs.values())
    numbered = torch.empty([2 + dim for dim in range(input.dim())], device="meta")
    order = [size - 2 for size in func(numbered, *args).shape]
    return wrap(func(unwrap(input), *args), input._partition.selected(order))


@rule("unsqueeze")
def _unsqueeze(func: Any, input: Any, dim: int) -> Any:
    dims: list[int | None] = list(range(input.dim()))
    dims.insert(dim % (len(dims) + 1), None)
    return wrap(func(unwrap(input), dim), input._partition.selected(dims))


@rule("squeeze")
def _squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    ndim = input.dim()
    every = range(ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    chosen = {d % ndim for d in every if input.shape[d % ndim] == 1}
    input = gathered(input, chosen)
    kept = [d for d in range(ndim) if d not in chosen]
    return wrap(unwrap(input).squeeze(tuple(chosen)), partition_of(input).selected(kept))


@rule("expand", "expand_as", "broadcast_to")
def _expand(func: Any, input: Any, *args: Any) -> Any:
    if args and isinstance(args[0], SpatialTensor):
        target = args[0]._partition
        return wrap(fit("expand", input, target).expand(target.local_shape), target)
    sizes = _sizes((args[0].shape,) if isinstance(args[0], Tensor) else args)
    new = len(sizes) - input.dim()
    partition = input._partition.selected([None] * new + list(range(input.dim())))
    for dim, size in enumerate(sizes):
        if size in (-1, partition.shape[dim]):
            continue
        if partition.is_cut(dim):
            refuse("expand of a cut dim")
        partition = partition.replaced(dim, size)
    return wrap(unwrap(input).expand(partition.local_shape), partition)


@rule("cat", "concat", "concatenate")
def _cat(func: Any, tensors: Any, dim: int = 0) -> Any:
    tensors = [x for x in tensors if x.dim() > 1 or x.numel()]
    dim = dim % tensors[0].dim()
    total = sum(x.shape[dim] for x in tensors)
    target = common([partition_of(x).replaced(dim, 1) for x in tensors])
    cuts = [partition_of(x).cuts[dim] for x in tensors]
    cut = next((cut for cut in cuts if cut is not None), None)
    result = None if cut is None else cut.resized(total)
    parts, offset = [], 0
    for x, own in zip(tensors, cuts, strict=True):
        size = x.shape[dim]
        part = fit("cat", x, target.replaced(dim, size, own))
        parts.append(part if result is None else _own_rows(part, dim, own, offset, size, result))
        offset += size
    return wrap(torch.cat(parts, dim), target.replaced(dim, total, result))


def _own_rows(
    part: Tensor, dim: int, cut: Cut | None, offset: int, size: int, result: Cut
) -> Tensor:
    """Return the rows of one tensor that are this rank's in a concatenation along a cut dim."""
    spans = [
        (min(max(start - offset, 0), size), min(max(stop - offset, 0), size))
        for start, stop in result.spans()
    ]
    if cut is not None:
        if cut.axis != result.axis:
            refuse("cat along a dim that different axes cut")
        return fetch_rows(part, dim, cut, single(spans), label="cat")
    start, stop = spans[result.axis.rank]
    return replicated(part, [result.axis]).narrow(dim, start, stop - start)


@rule("stack")
def _stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@rule("split", "chunk", "split_with_sizes")
def _split(func: Any, input: Any, sizes: Any, dim: int = 0) -> Any:
    dim = dim % input.dim()
    counts = [part.shape[0] for part in func(torch.empty(input.shape[dim], device="meta"), sizes)]
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return tuple(_interval(input, dim, start, stop, 1) for start, stop in bounds)


@rule("narrow")
def _narrow(func: Any, input: Any, dim: int, start: int, length: int) -> Any:
    dim = dim % input.dim()
    start = int(start) % input.shape[dim] if int(start) < 0 else int(start)
    return _interval(input, dim, start, start + length, 1)


@rule("select")
def _select(func: Any, input: Any, dim: int, index: int) -> Any:
    return _one(input, dim % input.dim(), int(index))


@rule("unbind")
def _unbind(func: Any, input: Any, dim: int = 0) -> Any:
    dim = dim % input.dim()
    if input._partition.is_cut(dim):
        refuse("unbind of a cut dim")
    return tuple(_one(input, dim, index) for index in range(input.shape[dim]))


def _interval(x: Any, dim: int, start: int, stop: int, step: int) -> Any:
    """Return rows of one dim, cut at the same fractions as before."""
    size = x.shape[dim]
    if (start, step) == (0, 1) and stop >= size:
        return x
    partition, local = partition_of(x), unwrap(x)
    cut = partition.cuts[dim]
    if cut is None:
        local = local[(slice(None),) * dim + (slice(start, stop, step),)]
        return wrap(local, partition.replaced(dim, local.shape[dim]))
    count = max(0, -(-(min(stop, size) - start) // step))
    result = cut.resized(count)
    spans = [
        (start + a * step, start + (b - 1) * step + 1) if a < b else (0, 0)
        for a, b in result.spans()
    ]
    local = fetch_rows(local, dim, cut, single(spans), label="slice")
    if step > 1:
        local = local[(slice(None),) * dim + (slice(None, None, step),)]
    return wrap(local, partition.replaced(dim, count, result))


def _one(x: Any, dim: int, index: int) -> Any:
    """Return one row of a dim; every rank gets it."""
    size = x.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dim {dim} of {size} rows")
    if partition_of(x).is_cut(dim):
        return gathered(_interval(x, dim, index % size, index % size + 1, 1), [dim]).squeeze(dim)
    others = [d for d in range(x.dim()) if d != dim]
    return wrap(unwrap(x).select(dim, index), partition_of(x).selected(others))


@rule("getitem")
def _getitem(func: Any, input: Any, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(input, SpatialTensor) or any(isinstance(i, (Tensor, list)) for i in items):
        return refuse("indexing by a tensor")
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (input.dim() - consumed)
    x: Any = input
    dim = 0
    for item in items:
        if item is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif isinstance(item, slice):
            start, stop, step = item.indices(x.shape[dim])
            if step < 0:
                refuse("a slice with a negative step")
            x = _interval(x, dim, start, stop, step)
            dim += 1
        elif isinstance(item, int):
            x = x.select(dim, item)
        else:
            refuse(f"indexing by {type(item).__name__}")
    return x


@rule("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(func: Any, input: Any, factor: int) -> Any:
    if function_name(func) == "pixel_shuffle":  # [..., C, y, x, H, W] to [..., C, H, y, W, x]
        x = input.unflatten(-3, (-1, factor, factor)).movedim((-4, -3), (-3, -1))
        return x.flatten(-2).flatten(-3, -2)
    x = input.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
    return x.movedim((-3, -1), (-4, -3)).flatten(-5, -3)


@rule("channel_shuffle")
def _channel_shuffle(func: Any, input: Any, groups: int) -> Any:
    return input.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
