"""Views, permutations, slices and concatenations: mostly arithmetic on the partition.

A view that merges a cut dim with others keeps its factors, so that windows and patches stay where
they are. A view that splits a cut dim needs bounds at multiples of the inner size; rows move where
they are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.align import (
    common,
    fit,
    gather_dim,
    gathered,
    partition_of,
    split_factor,
)
from fusedops.parallel.spatial.halo import fetch_rows
from fusedops.parallel.spatial.partition import (
    Cut,
    Factor,
    Factors,
    Partition,
    plain,
    simplified,
    single,
)
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
    local, partition = unwrap(x), x._partition
    source, shape = list(partition.dims), partition.shape
    result: list[Factors] = []
    local_sizes: list[int] = []
    first, place = 0, 0
    while first < len(shape) or place < len(sizes):
        last, end = first + 1, place + 1
        have = shape[first] if first < len(shape) else 1
        need = sizes[place] if place < len(sizes) else 1
        while have != need:
            if have < need and last < len(shape):
                have, last = have * shape[last], last + 1
            else:
                need, end = need * sizes[end], end + 1
        group, targets = source[first:last], sizes[place:end]
        factors = simplified([factor for dim in group for factor in dim])
        at = len(local_sizes)
        if first < len(shape):
            local = local.flatten(at, at + len(group) - 1) if len(group) > 1 else local
        if place >= len(sizes):
            local = local.squeeze(at)
        elif first >= len(shape):
            local = local.unsqueeze(at)
            result.append(plain(1))
            local_sizes.append(1)
        else:
            local, dims, parts = split_factor(factors, targets, local, at)
            rest = list(local.shape)[len(local.shape) - sum(1 for _ in source[last:]) :]
            local = local.reshape(*local_sizes, *parts, *rest)
            result += dims
            local_sizes += parts
        first, place = last, end
    return wrap(local, Partition(tuple(result)))


@rule("flatten")
def _flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % input.dim(), end_dim % input.dim()
    shape = list(input.shape)
    return input.view(*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


@rule("unflatten")
def _unflatten(func: Any, input: Any, dim: int, sizes: Any, *_: Any) -> Any:
    dim, shape = dim % input.dim(), list(input.shape)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return input.view(*shape[:dim], *sizes, *shape[dim + 1 :])


@rule("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT")
def _permute(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    args = (*args, *kwargs.values())
    local = unwrap(input)
    order = torch.arange(input.dim(), device="cpu")
    order = func(torch.empty([2 + i for i in range(input.dim())], device="meta"), *args).shape
    dims = tuple(input._partition.dims[size - 2] for size in order)
    return wrap(func(local, *args), Partition(dims))


@rule("unsqueeze")
def _unsqueeze(func: Any, input: Any, dim: int) -> Any:
    dims = list(input._partition.dims)
    dims.insert(dim % (len(dims) + 1), plain(1))
    return wrap(func(unwrap(input), dim), Partition(tuple(dims)))


@rule("squeeze")
def _squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    ndim = input.dim()
    every = range(ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    chosen = {d % ndim for d in every if input.shape[d % ndim] == 1}
    input = gathered(input, [d for d in chosen if input._partition.is_cut(d)])
    if not isinstance(input, SpatialTensor):
        return input.squeeze(tuple(chosen))
    dims = [factors for d, factors in enumerate(input._partition.dims) if d not in chosen]
    return wrap(unwrap(input).squeeze(tuple(chosen)), Partition(tuple(dims)))


@rule("expand", "expand_as", "broadcast_to")
def _expand(func: Any, input: Any, *args: Any) -> Any:
    if args and isinstance(args[0], SpatialTensor):
        target = args[0]._partition
        return wrap(fit("expand", input, target).expand(target.local_shape), target)
    partition = input._partition
    sizes = _sizes((args[0].shape,) if isinstance(args[0], Tensor) else args)
    offset = len(sizes) - input.dim()
    dims, local_sizes = [], []
    for place, size in enumerate(sizes):
        dim = place - offset
        if dim >= 0 and (size in (-1, partition.shape[dim])):
            dims.append(partition.dims[dim])
            local_sizes.append(partition.local_shape[dim])
        else:
            if dim >= 0 and partition.is_cut(dim):
                refuse("expand of a dim that is cut")
            dims.append(plain(size))
            local_sizes.append(size)
    return wrap(unwrap(input).expand(local_sizes), Partition(tuple(dims)))


@rule("cat", "concat", "concatenate")
def _cat(func: Any, tensors: Any, dim: int = 0) -> Any:
    tensors = [x for x in tensors if x.dim() > 1 or x.numel()]
    dim = dim % tensors[0].dim()
    if any(partition_of(x).is_cut(dim) for x in tensors):
        return _cat_cut(tensors, dim)
    sizes = [x.shape[dim] for x in tensors]
    heads = [_head(x, dim) for x in tensors]
    target = common(heads)
    parts = []
    for x, size in zip(tensors, sizes, strict=True):
        parts.append(fit("cat", x, target.replaced(dim, Factor(size))))
    return wrap(torch.cat(parts, dim), target.replaced(dim, Factor(sum(sizes))))


def _head(x: Any, dim: int) -> Any:
    """Return a tensor without elements that has the partition of ``x`` but for one dim."""
    partition = partition_of(x).replaced(dim, Factor(1))
    return SpatialTensor(torch.empty(partition.local_shape, device="meta"), partition)


def _cat_cut(tensors: list[Any], dim: int) -> Any:
    """Concatenate along a cut dim: every rank gets its rows of the result."""
    tensors = [_one_axis(x, dim) for x in tensors]
    first = next((x for x in tensors if partition_of(x).is_cut(dim)), None)
    if first is None:  # all were gathered
        return _cat(torch.cat, tensors, dim)
    cut = first._partition.cut("cat", dim)
    sizes = [x.shape[dim] for x in tensors]
    target = common([_head(x, dim) for x in tensors])
    total = sum(sizes)
    result = cut.resized(total)
    few = [x for x in tensors if not partition_of(x).is_cut(dim)]
    if len(few) == len(tensors) - 1:  # rows before and behind one cut tensor stay at its ends
        at = next(i for i, x in enumerate(tensors) if partition_of(x).is_cut(dim))
        before = sum(sizes[:at])
        own = partition_of(tensors[at]).cut("cat", dim)
        assert own is not None
        inner = [bound + before for bound in own.bounds[1:-1]]
        result = cut.moved([0, *inner, total])
    parts, offset = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        spans = [
            (min(max(a - offset, 0), size), min(max(b - offset, 0), size))
            for a, b in result.spans()
        ]
        own = partition_of(x).cut("cat", dim)
        if own is None:
            piece = replicated(fit("cat", x, target.replaced(dim, Factor(size))), [cut.axis])
            start, stop = spans[cut.axis.rank]
            parts.append(piece.narrow(dim, start, stop - start))
        else:
            piece = fit("cat", x, target.replaced(dim, Factor(size, own)))
            parts.append(fetch_rows(piece, dim, own, single(spans), label="cat"))
        offset += size
    return wrap(torch.cat(parts, dim), target.replaced(dim, Factor(total, result)))


def _one_axis(x: Any, dim: int) -> Any:
    """Return a tensor whose dim is cut by one axis at most: others are gathered."""
    partition = partition_of(x)
    if len(partition.dims[dim]) == 1:
        return x
    local, factors = unwrap(x), list(partition.dims[dim])
    lead = next(i for i, factor in enumerate(factors) if factor.cut is not None)
    if lead > 0:
        return gathered(x, [dim])
    rest = [Factor(factor.size) for factor in factors[1:]]
    split = local.unflatten(dim, [factor.extent for factor in factors])
    for place, factor in enumerate(factors[1:], start=1):
        split = gather_dim(split, dim + place, (factor,))
    local = split.flatten(dim, dim + len(factors) - 1)
    return wrap(local, partition.replaced(dim, factors[0], *rest))


@rule("stack")
def _stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@rule("split", "chunk", "split_with_sizes")
def _split(func: Any, input: Any, sizes: Any, dim: int = 0) -> Any:
    dim = dim % input.dim()
    counts = [part.shape[0] for part in func(torch.empty(input.shape[dim], device="meta"), sizes)]
    result, start = [], 0
    for count in counts:
        result.append(_interval(input, dim, start, start + count, 1))
        start += count
    return tuple(result)


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


@rule("iter")
def _iter(func: Any, input: Any) -> Any:
    return iter(_unbind(func, input))


@rule("len")
def _len(func: Any, input: Any) -> int:
    return input.shape[0]


def _interval(x: Any, dim: int, start: int, stop: int, step: int) -> Any:
    """Return rows of one dim, cut at the same fractions as before."""
    size = x.shape[dim]
    if (start, step) == (0, 1) and stop >= size:
        return x
    partition, local = x._partition, unwrap(x)
    if not partition.is_cut(dim):
        local = local[(slice(None),) * dim + (slice(start, stop, step),)]
        return wrap(local, partition.replaced(dim, Factor(local.shape[dim])))
    cut = partition.cut("a slice", dim)
    assert cut is not None
    count = max(0, -(-(min(stop, size) - start) // step))
    result = cut.resized(count)
    spans = [
        (start + a * step, start + (b - 1) * step + 1) if a < b else (0, 0)
        for a, b in result.spans()
    ]
    local = fetch_rows(local, dim, cut, single(spans), label="slice")
    if step > 1:
        local = local[(slice(None),) * dim + (slice(None, None, step),)]
    return wrap(local, partition.replaced(dim, Factor(count, result)))


def _one(x: Any, dim: int, index: int) -> Any:
    """Return one row of a dim; every rank gets it."""
    size = x.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dim {dim} of {size} rows")
    index = index % size
    partition, local = x._partition, unwrap(x)
    cut: Cut | None = None
    if partition.is_cut(dim):
        if len(partition.dims[dim]) > 1:
            x = gathered(x, [dim])
            return x[(slice(None),) * dim + (index,)]
        cut = partition.cut("select", dim)
    dims = tuple(factors for d, factors in enumerate(partition.dims) if d != dim)
    if cut is not None:
        narrow = _interval(x, dim, index, index + 1, 1)
        local = unwrap(narrow)
        local = gather_dim(local, dim, narrow._partition.dims[dim])
        return wrap(local.squeeze(dim), Partition(dims))
    return wrap(local.select(dim, index), Partition(dims))


@rule("getitem")
def _getitem(func: Any, input: Any, index: Any) -> Any:
    if not isinstance(input, SpatialTensor):
        return refuse("indexing by a tensor")
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (Tensor, list)) for item in items):
        return refuse("indexing by a tensor")
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in [item for item in items if not isinstance(item, Tensor)]:
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
            x = (
                _interval(x, dim, start, stop, step)
                if isinstance(x, SpatialTensor)
                else x[(slice(None),) * dim + (item,)]
            )
            dim += 1
        elif isinstance(item, int):
            x = x.select(dim, item)
        else:
            refuse(f"indexing by {type(item).__name__}")
    return x


@rule("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(func: Any, input: Any, factor: int) -> Any:
    *batch, channels, height, width = input.shape
    ndim, lead = input.dim(), list(range(input.dim() - 3))
    if function_name(func) == "pixel_shuffle":
        x = input.view(*batch, channels // factor**2, factor, factor, height, width)
        x = x.permute(*lead, ndim - 3, ndim, ndim - 2, ndim + 1, ndim - 1)
        return x.reshape(*batch, channels // factor**2, height * factor, width * factor)
    x = input.view(*batch, channels, height // factor, factor, width // factor, factor)
    x = x.permute(*lead, ndim - 3, ndim - 1, ndim + 1, ndim - 2, ndim)
    return x.reshape(*batch, channels * factor**2, height // factor, width // factor)


@rule("channel_shuffle")
def _channel_shuffle(func: Any, input: Any, groups: int) -> Any:
    return input.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
