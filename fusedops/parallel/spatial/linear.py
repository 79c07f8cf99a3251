"""Products and attention: what is contracted is complete, or summed over the ranks.

Rows of the result stay where the rows of the first operand are. Where the second operand is cut
along what the result contracts or along its columns, it is gathered: keys and values of attention
over all patches. Dims of heads are batches, which stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.align import common, fit, fit_dim, partition_of
from fusedops.parallel.spatial.partition import Axis, Cut, Partition
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    replicated,
    replicated_all,
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
    weight, bias = replicated_all([weight, bias], partition.axes)
    out = func(unwrap(input), weight, bias)
    return wrap(out, partition.replaced(input.dim() - 1, weight.shape[0]))


@rule("matmul", "bmm", "mm")
def _matmul(func: Any, input: Any, other: Any) -> Any:
    if input.dim() < 2 or other.dim() < 2:
        return refuse("a product with a vector")
    rows, inner = partition_of(input).cuts[-2:]
    _, columns = partition_of(other).cuts[-2:]
    batch = _batch([input, other])
    used = [*batch.axes, *(cut.axis for cut in (rows, inner) if cut is not None)]
    if len(set(used)) < len(used):
        return refuse("a product whose operands are cut by one axis in several dims")
    if columns is not None and columns.axis in used:
        columns = None
    axes = [*used, *([] if columns is None else [columns.axis])]
    mine = _operand(input, batch, (rows, inner), axes)
    theirs = _operand(other, batch, (inner, columns), axes)
    out = torch.matmul(mine, theirs)
    if inner is not None:
        out = summed(out, [inner.axis])
    return wrap(out, _product(batch, input.shape[-2], rows, other.shape[-1], columns))


def _batch(tensors: Sequence[Any]) -> Partition:
    """Return the partition of the dims before rows and columns, which broadcast."""
    return common([partition_of(x).selected(range(x.dim() - 2)) for x in tensors])


def _product(
    batch: Partition, rows: int, row_cut: Cut | None, columns: int, column_cut: Cut | None
) -> Partition:
    shape = (*batch.shape, rows, columns)
    return Partition(shape, (*batch.cuts, row_cut, column_cut))


def _operand(x: Any, batch: Partition, last: Sequence[Cut | None], axes: Sequence[Axis]) -> Tensor:
    """Return an operand's part with these cuts of its last two dims.

    Args:
        x: the operand.
        batch: the dims before the last two of the result.
        last: the cuts of rows and columns.
        axes: over which ranks compute different parts of the product, so that gradients are added.
    """
    has = partition_of(x)
    local = replicated(unwrap(x), [axis for axis in axes if axis not in has.axes])
    for dim in range(-x.dim(), 0):
        before = has.cuts[dim]
        target = last[dim] if dim >= -2 else batch.cuts[dim + 2]
        if dim < -2 and has.shape[dim] == 1 and batch.shape[dim + 2] != 1:
            target = None
        partial = before is not None and before.axis in axes
        local = fit_dim("a product", local, dim % x.dim(), before, target, partial=partial)
    return local


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
    rows = partition_of(query).cuts[-2]
    if is_causal and rows is not None:
        return refuse("causal attention over patches that are cut")
    batch = _batch([query, key, value])
    axes = [*batch.axes, *([] if rows is None else [rows.axis])]
    q = _operand(query, batch, (rows, None), axes)
    k, v = (_operand(x, batch, (None, None), axes) for x in (key, value))
    if isinstance(attn_mask, Tensor):
        target = _product(batch, query.shape[-2], rows, key.shape[-2], None)
        attn_mask = fit("attention", attn_mask, target)
    out = func(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return wrap(out, _product(batch, query.shape[-2], rows, value.shape[-1], None))
