"""Sums, means, extremes, losses and products over dims that may be cut.

A reduction over cut dims is that of the parts, and one all-reduce of the result, which is then
replicated. Losses are sums of elementwise losses divided by global counts.

Rows of a product stay where the rows of the first operand are. Where the second operand is cut
along what the result contracts or along its columns, it is gathered: keys and values of attention
over all patches. Dims of heads are batches, which stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._core import dtypes
from fusedops.parallel.spatial.align import common, fit, partition_of
from fusedops.parallel.spatial.partition import Axis, Cut, Partition
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    all_reduced,
    function_name,
    replicated_all,
    rule,
    summed,
    unwrap,
    wrap,
)


def dims_of(dim: Any, ndim: int) -> list[int]:
    """Return the dims that an argument of torch names, from 0 on; all by default."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(ndim))
    return [d % ndim for d in ([dim] if isinstance(dim, int) else dim)]


def axes_of(partition: Partition, dims: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes that cut these dims."""
    return tuple(cut.axis for dim in dims if (cut := partition.cuts[dim]) is not None)


def reduced(partition: Partition, dims: Sequence[int], keepdim: bool) -> Partition:
    """Return the partition of a reduction over dims."""
    places = [None if dim in dims else dim for dim in range(len(partition.shape))]
    return partition.selected(dim for dim in places if keepdim or dim is not None)


@rule("sum", "mean")
def _sum(
    func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    dims, partition = dims_of(dim, input.dim()), input._partition
    axes = axes_of(partition, dims)
    add = torch.sum if axes else func
    total = summed(add(unwrap(input), dims, keepdim, dtype=dtype), axes)
    if axes and function_name(func) == "mean":
        total = total / math.prod(input.shape[d] for d in dims)
    return wrap(total, reduced(partition, dims, keepdim))


@rule("var", "std")
def _var(
    func: Any,
    input: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = dims_of(dim, input.dim())
    count = math.prod(input.shape[d] for d in dims)
    less = int(unbiased) if correction is None else correction
    squares = (input - input.mean(dims, True)) ** 2
    result = squares.sum(dims, keepdim) / max(0, count - less)
    return result.sqrt() if function_name(func) == "std" else result


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], axes: tuple[Axis, ...], op: str) -> Tensor:
        if x.numel():
            local = x.amax(dims, True) if op == "max" else x.amin(dims, True)
        else:
            limits = (-math.inf, math.inf)
            if not x.is_floating_point():
                limits = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
            shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
            local = x.new_full(shape, limits[op == "min"])
        result = all_reduced(local, axes, op=op, label=op)
        count = all_reduced((x == result).sum(dims, True), axes, label=op)
        ctx.save_for_backward(x, result, count)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result, count = ctx.saved_tensors
        return torch.where(x == result, grad / count, 0), None, None, None


@rule("amax", "amin")
def _extreme(func: Any, input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    dims, partition = dims_of(dim, input.dim()), input._partition
    if axes := axes_of(partition, dims):
        result = _Extreme.apply(unwrap(input), dims, axes, function_name(func)[1:])
        result = result if keepdim else result.squeeze(tuple(dims))
    else:
        result = func(unwrap(input), dims, keepdim)
    return wrap(result, reduced(partition, dims, keepdim))


@rule("max", "min", "argmax", "argmin")
def _along(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Run a function along one dim that is not cut."""
    name, ndim = function_name(func), input.dim()
    if isinstance(dim, Tensor):
        return (torch.maximum if name == "max" else torch.minimum)(input, dim)
    if dim is None and name in ("max", "min"):
        return input.amax() if name == "max" else input.amin()
    if dim is None or input._partition.is_cut(dim % ndim):
        return refuse(f"{name} along a cut dim")
    partition = reduced(input._partition, [dim % ndim], keepdim)
    result = func(unwrap(input), dim, keepdim)
    if isinstance(result, Tensor):
        return wrap(result, partition)
    return type(result)([wrap(part, partition) for part in result])


@rule("softmax", "log_softmax", "softmin")
def _softmax(
    func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    if dtype is not None:
        input = input.to(dtype)
    if dim is None:
        refuse("softmax without a dim")
    if input._partition.is_cut(dim % input.dim()):
        refuse(f"{function_name(func)} along a cut dim")
    return wrap(func(unwrap(input), dim), input._partition)


@rule("linalg_vector_norm", "norm", "vector_norm")
def _norm(
    func: Any, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    if kwargs.pop("ord", p) not in (2, "fro", None) or any(kwargs.values()):
        return refuse("a norm that is not of order 2")
    dims, partition = dims_of(dim, input.dim()), input._partition
    result = torch.linalg.vector_norm(unwrap(input), 2, dims, keepdim)
    if axes := axes_of(partition, dims):
        total = summed(result.to(dtypes.statistics_dtype(result.dtype)).square(), axes)
        positive = total > 0  # a root has no finite gradient at 0
        total = torch.where(positive, total, 1.0).sqrt()
        result = torch.where(positive, total, 0.0).to(result.dtype)
    return wrap(result, reduced(partition, dims, keepdim))


@rule("normalize")
def _normalize(
    func: Any, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    return input / torch.norm(input, p, dim, True).clamp_min(eps)


@rule(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "kl_div"),
)
def _loss(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute elementwise; the mean is a global one."""
    reduction = kwargs.pop("reduction", "mean")
    for old in ("size_average", "reduce"):
        if kwargs.pop(old, None) is not None:
            refuse(f"{function_name(func)} with {old}")
    if args or reduction not in ("mean", "sum", "none", "batchmean"):
        return refuse(f"{function_name(func)} with positional options")
    partition = common(map(partition_of, (input, target)))
    parts = [fit("a loss", x, partition) for x in (input, target)]
    kwargs = {name: fit("a loss", x, partition) for name, x in kwargs.items()}
    losses = wrap(func(*parts, reduction="none", **kwargs), partition)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "batchmean":
        return total / partition.shape[0]
    return total / math.prod(partition.shape) if reduction == "mean" else total


@rule("cross_entropy", "nll_loss")
def _cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Classify every position: dim 1 of the input has the classes, and is not cut."""
    old = [options.pop(name, None) for name in ("size_average", "reduce")]
    if old != [None, None] or input.dim() == 1:
        return refuse("cross_entropy with size_average or reduce")
    of_target = partition_of(target)
    if target.dim() != input.dim():
        of_target = of_target.selected([0, None, *range(1, target.dim())])
    partition = common([partition_of(input), of_target])
    if partition.is_cut(1):
        return refuse("cross_entropy over classes that are cut")
    without = partition.selected([0, *range(2, input.dim())])
    logits = fit("cross_entropy", input, partition)
    labels = fit("cross_entropy", target, partition if target.dim() == input.dim() else without)
    options |= {"weight": weight, "ignore_index": ignore_index}
    losses = wrap(func(logits, labels, reduction="none", **options), without)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    if target.dim() == input.dim():
        return total / math.prod(without.shape)
    valid = labels != ignore_index
    counts = valid if weight is None else weight[labels.clamp_min(0)] * valid
    count = all_reduced(counts.sum().to(logits.dtype), without.axes, label="count")
    return total / count


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
    sizes = input.shape[-2], other.shape[-1]
    return wrap(out, Partition((*batch.shape, *sizes), (*batch.cuts, rows, columns)))


def _batch(tensors: Sequence[Any]) -> Partition:
    """Return the partition of the dims before rows and columns, which broadcast."""
    return common([partition_of(x).selected(range(x.dim() - 2)) for x in tensors])


def _operand(x: Any, batch: Partition, last: Sequence[Cut | None], axes: Sequence[Axis]) -> Tensor:
    """Return an operand's part with these cuts of its last two dims."""
    target = Partition((*batch.shape, *x.shape[-2:]), (*batch.cuts, *last))
    return fit("a product", x, target, axes)


@rule("scaled_dot_product_attention")
def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    rows = partition_of(query).cuts[-2]
    if is_causal and rows is not None:
        return refuse("causal attention over patches that are cut")
    batch = _batch([query, key, value])
    axes = [*batch.axes, *([] if rows is None else [rows.axis])]
    q = _operand(query, batch, (rows, None), axes)
    k, v = (_operand(x, batch, (None, None), axes) for x in (key, value))
    if isinstance(attn_mask, Tensor):
        sizes = query.shape[-2], key.shape[-2]
        target = Partition((*batch.shape, *sizes), (*batch.cuts, rows, None))
        attn_mask = fit("attention", attn_mask, target)
    out = func(q, k, v, attn_mask, dropout_p, is_causal, **options)
    sizes = query.shape[-2], value.shape[-1]
    return wrap(out, Partition((*batch.shape, *sizes), (*batch.cuts, rows, None)))
