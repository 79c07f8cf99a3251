"""Products and attention: what is contracted is complete, or summed over the ranks.

Rows of the result stay where the rows of the first operand are. Where the second operand is cut
along what the result contracts or along its columns, it is gathered: keys and values of attention
over all patches. Dims of windows or heads are batches, which stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.align import common, fit, gather_dim, partition_of
from fusedops.parallel.spatial.partition import Factor, Partition, cuts, plain
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    replicated,
    rule,
    summed,
    unwrap,
    wrap,
)


@rule("linear")
def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(input, SpatialTensor) or isinstance(weight, SpatialTensor):
        return refuse("linear with a weight that is cut")
    partition = input._partition
    if partition.is_cut(input.dim() - 1):
        out = torch.matmul(input, weight.t())
        return out if bias is None else out + bias
    weight, bias = (replicated(p, partition.axes) for p in (weight, bias))
    out = func(unwrap(input), weight, bias)
    return wrap(out, partition.replaced(input.dim() - 1, Factor(weight.shape[0])))


@rule("matmul", "bmm", "mm")
def _matmul(func: Any, input: Any, other: Any) -> Any:
    if input.dim() < 2 or other.dim() < 2:
        return refuse("a product with a vector")
    first, second = partition_of(input), partition_of(other)
    # Batches broadcast as elementwise operands do.
    batches = common([_batch(first), _batch(second)])
    rows, inner = first.dims[-2:]
    inner_other, columns = second.dims[-2:]
    used = set(batches.axes)
    if cuts(inner) and not cuts(inner_other):
        inner_other = inner
    partial = bool(cuts(inner))
    if partial and {c.axis for c in cuts(inner)} & ({c.axis for c in cuts(rows)} | used):
        return refuse("a product whose operands are cut by one axis in several dims")
    used_axes = used | {cut.axis for cut in (*cuts(rows), *cuts(inner))}
    if not partial and cuts(inner_other):
        inner_other = plain(second.shape[-2])
    if any(cut.axis in used_axes for cut in cuts(columns)):
        columns = plain(second.shape[-1])
    left = Partition((*batches.dims, rows, inner))
    right = Partition((*batches.dims, inner if partial else inner_other, columns))
    result = Partition((*batches.dims, rows, columns))
    mine = _fit(input, left, result)
    theirs = _fit(other, right, result)
    out = torch.matmul(mine, theirs)
    if partial:
        out = summed(out, [cut.axis for cut in cuts(inner)])
    return wrap(out, result)


def _batch(partition: Partition) -> Any:
    dims = partition.dims[:-2]
    part = Partition(dims)
    return SpatialTensor(torch.empty(part.local_shape, device="meta"), part)


def _fit(x: Any, target: Partition, result: Partition) -> Any:
    """Return an operand's part; gradients are added over axes that cut the result and not it."""
    has, offset = partition_of(x), len(target.dims) - x.dim()
    local = unwrap(x)
    kept = set(target.axes)
    shrunk = Partition(
        tuple(
            target.dims[dim + offset] if dim >= x.dim() - 2 or has.shape[dim] != 1 else plain(1)
            for dim in range(x.dim())
        )
    )
    for dim in range(x.dim() - 2, x.dim()):
        if has.is_cut(dim) and not cuts(shrunk.dims[dim]):
            needed = any(cut.axis in result.axes for cut in cuts(has.dims[dim]))
            local = gather_dim(local, dim, has.dims[dim], partial=needed)
            has = has.replaced(dim, Factor(has.shape[dim]))
    local = wrap(local, has) if has.axes else local
    gathered_axes = {cut.axis for factors in partition_of(x).dims for cut in cuts(factors)}
    out = fit("matmul", local, shrunk)
    more = [
        axis
        for axis in result.axes
        if axis not in kept and axis not in gathered_axes and axis not in shrunk.axes
    ]
    missing = [axis for axis in target.axes if axis not in shrunk.axes]
    return replicated(out, [*more, *missing])


@rule("scaled_dot_product_attention")
def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if is_causal and isinstance(query, SpatialTensor) and query._partition.is_cut(query.dim() - 2):
        return refuse("causal attention over patches that are cut")
    rows = partition_of(query).dims[-2]
    batches = common([_batch(partition_of(x)) for x in (query, key, value)])
    size = plain(value.shape[-1])
    result = Partition((*batches.dims, rows, size))
    parts = [_fit(query, Partition((*batches.dims, rows, plain(query.shape[-1]))), result)]
    for x in (key, value):
        target = Partition((*batches.dims, plain(x.shape[-2]), plain(x.shape[-1])))
        parts.append(_fit(x, target, result))
    if isinstance(attn_mask, Tensor):
        target = Partition((*batches.dims, rows, plain(key.shape[-2])))
        attn_mask = fit("attention", attn_mask, target)
    out = func(*parts, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return wrap(out, result)
