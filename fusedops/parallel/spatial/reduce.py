"""Sums, means, extremes and losses over dims that may be cut.

A reduction over cut dims is that of the parts, and one all-reduce of the result, which is then
replicated. Losses are sums of elementwise losses divided by global counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.align import common, common_of, fit, partition_of
from fusedops.parallel.spatial.partition import Axis, Partition
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    all_reduced,
    function_name,
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


@rule("sum")
def _sum(
    func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    dims = dims_of(dim, input.dim())
    partition = input._partition
    local = func(unwrap(input), dims, keepdim, dtype=dtype)
    return wrap(summed(local, axes_of(partition, dims)), reduced(partition, dims, keepdim))


@rule("mean")
def _mean(
    func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    dims = dims_of(dim, input.dim())
    if not axes_of(input._partition, dims):
        local = func(unwrap(input), dims, keepdim, dtype=dtype)
        return wrap(local, reduced(input._partition, dims, keepdim))
    count = math.prod(input.shape[d] for d in dims)
    return input.sum(dims, keepdim, dtype=dtype) / count


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
    less = correction if correction is not None else int(unbiased)
    mean = input.mean(dims, True)
    result = ((input - mean) ** 2).sum(dims, keepdim) / max(0, count - less)
    return result.sqrt() if function_name(func) == "std" else result


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], axes: tuple[Axis, ...], op: str) -> Tensor:
        limit = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        worst = -math.inf if x.is_floating_point() else limit.min
        if op == "min":
            worst = -worst if x.is_floating_point() else limit.max
        if x.numel():
            local = x.amax(dims, True) if op == "max" else x.amin(dims, True)
        else:
            shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
            local = x.new_full(shape, worst)
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
    dims, op = dims_of(dim, input.dim()), function_name(func)[1:]
    partition = input._partition
    axes = axes_of(partition, dims)
    local = unwrap(input)
    if not axes:
        return wrap(func(local, dims, keepdim), reduced(partition, dims, keepdim))
    result = _Extreme.apply(local, dims, axes, op)
    return wrap(
        result if keepdim else result.squeeze(tuple(dims)), reduced(partition, dims, keepdim)
    )


@rule("max", "min")
def _max(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    name = function_name(func)
    if isinstance(dim, Tensor):
        return (torch.maximum if name == "max" else torch.minimum)(input, dim)
    if dim is None:
        return input.amax() if name == "max" else input.amin()
    return along(func, input, dim, keepdim)


@rule("argmax", "argmin")
def _along(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None:
        return refuse(f"{function_name(func)} along a cut dim")
    return along(func, input, dim, keepdim)


def along(func: Any, input: Any, dim: int, keepdim: bool = False) -> Any:
    """Run a function along one dim that is not cut."""
    dim = dim % input.dim()
    if input._partition.is_cut(dim):
        refuse(f"{function_name(func)} along a cut dim")
    partition = reduced(input._partition, [dim], keepdim)
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
    p, kwargs = kwargs.pop("ord", p), {k: v for k, v in kwargs.items() if v is not None}
    if p == "fro" or p is None:
        p = 2
    if kwargs or p != 2:
        return refuse("a norm that is not of order 2")
    dims = dims_of(dim, input.dim())
    if axes_of(input._partition, dims):
        return input.square().sum(dims, keepdim).sqrt()
    local = torch.linalg.vector_norm(unwrap(input), 2, dims, keepdim)
    return wrap(local, reduced(input._partition, dims, keepdim))


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
    partition = common_of([input, target])
    parts = [fit("a loss", x, partition) for x in (input, target)]
    kwargs = {name: fit("a loss", x, partition) for name, x in kwargs.items()}
    losses = wrap(func(*parts, reduction="none", **kwargs), partition)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "batchmean":
        return total / partition.shape[0]
    return total / math.prod(partition.shape) if reduction == "mean" else total


@rule("cross_entropy", "nll_loss", "nll_loss2d", "nll_loss_nd")
def _cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Classify every position: dim 1 of the input has the classes, and is not cut."""
    if size_average is not None or reduce is not None or input.dim() == 1:
        return refuse("cross_entropy with size_average or reduce")
    of_target = partition_of(target)
    if target.dim() != input.dim():
        of_target = of_target.selected([0, None, *range(1, target.dim())])
    partition = common([partition_of(input), of_target])
    if partition.is_cut(1):
        return refuse("cross_entropy over classes that are cut")
    without = partition.selected([0, *range(2, input.dim())])
    more = {"label_smoothing": label_smoothing} if label_smoothing else {}
    logits, labels = (
        fit("cross_entropy", input, partition),
        fit("cross_entropy", target, partition if target.dim() == input.dim() else without),
    )
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, **more}
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
