"""Normalization with the statistics of the complete tensor.

Every rank computes mean and sum of squares of its part, gathers those of all and merges them, which
loses nothing to cancellation. Saved are the part and the statistics, as on one process; the
backward adds two sums over the ranks.

``x`` is seen as ``[B, C, S]``. Batch norm has one group of statistics per channel (over ``B`` and
``S``), group and instance norm one per sample and group of channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks, dtypes
from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial.partition import Axis, Partition
from fusedops.parallel.spatial.reduce import axes_of
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    all_reduced,
    function_name,
    replicated,
    rule,
    unwrap,
    wrap,
)


def moments(x: Tensor, dims: list[int], axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over dims and ranks, dims kept."""
    wide = dtypes.statistics_dtype(x.dtype)
    count = math.prod(x.shape[dim] for dim in dims)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    if count:
        mean, var = (part.view(shape) for part in _own_moments(x.to(wide), dims))
    else:
        var = mean = x.new_zeros(shape, dtype=wide)
    total = torch.full((1,), float(count), dtype=wide, device=x.device)
    squares = var * count
    for axis in axes:
        sent = torch.cat([total, mean.reshape(-1), squares.reshape(-1)])
        parts = collectives.all_gather(sent, axis.group, label="moments").wait()
        parts = parts.view(axis.size, -1)
        counts, rest = parts[:, :1], parts[:, 1:]
        means, squared = rest.chunk(2, 1)
        total = counts.sum(0)
        merged = (means * counts).sum(0) / total
        squares = (squared + (means - merged) ** 2 * counts).sum(0).view(shape)
        mean = merged.view(shape)
    return mean, squares / total


def _own_moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of this rank's part over dims, in any shape.

    By the kernel of batch norms where the other dims are ``1``, or the first ones: it is four times
    as fast as ``torch.var_mean`` on a CPU. Tensors without data, for which torch does not implement
    that kernel, take the other way.
    """
    channels = _channels(x, dims)
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    if channels is None and x.is_contiguous() and rest and rest == list(range(len(rest))):
        channels = x.reshape(1, math.prod(x.shape[dim] for dim in rest), -1)
    if channels is None or x.is_meta or type(x) is not Tensor:
        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return mean, var
    return torch.ops.aten.batch_norm_update_stats(channels, None, None, 0.0)


def _channels(x: Tensor, dims: list[int]) -> Tensor | None:
    """Return ``[B, G, 1, S]`` without its dim of 1 if ``dims`` are those of a batch norm."""
    if x.dim() > 3 and x.shape[2] == 1 and dims == [0, *range(2, x.dim())]:
        return x.squeeze(2)
    return None


class _GroupedNorm(torch.autograd.Function):
    """``(x - mean) * rstd * weight + bias`` of ``[B, C, ...]``, seen as ``[B, G, c, ...]``.

    The result is no view: it may be changed in place without a copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        dims: list[int],
        count: int,
        axes: tuple[Axis, ...],
    ) -> Tensor:
        rstd = (var + eps).rsqrt()
        x = _grouped(local, mean.shape[1])
        ctx.is_batch_norm = _exact(x) and _channels(x, dims) is not None
        ctx.save_for_backward(local, weight, mean, rstd, var if ctx.is_batch_norm else None)
        ctx.numbers, ctx.has_bias = (eps, dims, count, axes), bias is not None
        out = torch.empty_like(local)
        if ctx.is_batch_norm:
            scale, shift = (None if t is None else t.flatten() for t in (weight, bias))
            statistics = mean.flatten(), var.flatten()
            # A rank may have no rows.
            return F.batch_norm(local, *statistics, scale, shift, eps=eps) if x.numel() else out
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        target = _grouped(out, mean.shape[1])
        if _exact(x):
            torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype), out=target)
        else:
            target.copy_(x.to(scale.dtype) * scale + shift)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        local, weight, mean, rstd, var = ctx.saved_tensors
        eps, dims, count, axes = ctx.numbers
        wide = mean.dtype
        x, of_groups = _grouped(local, mean.shape[1]), _grouped(grad, mean.shape[1])
        spatial = list(range(3, x.dim()))
        # Of grad, and of grad * xhat.
        if ctx.is_batch_norm:
            sums, product = _channel_sums(grad, local, mean, var, eps)
        else:
            sums = of_groups.sum(spatial, dtype=wide, keepdim=True)
            product = (of_groups * x).sum(spatial, dtype=wide, keepdim=True)
            if 0 in dims:
                sums, product = sums.sum(0, keepdim=True), product.sum(0, keepdim=True)
            product = (product - mean * sums) * rstd
        shape = sums.shape if sums.dim() == x.dim() else mean.shape
        both = all_reduced(torch.stack([sums, product]), axes, label="norm grad")
        sums, product = both[0].view(shape), both[1].view(shape)
        grad_weight = grad_bias = None
        if weight is not None:
            grad_weight = product.sum_to_size(weight.shape).to(weight.dtype)
        if ctx.has_bias:
            grad_bias = sums.sum_to_size((1, *x.shape[1:3], *[1] * len(spatial)))
        scale = rstd if weight is None else rstd * weight
        factor = 1.0 if weight is None else weight
        mean_grad = (sums * factor).sum_to_size(mean.shape) / count
        mean_product = (product * factor).sum_to_size(mean.shape) / count
        slope = -rstd * rstd * mean_product
        shift = -rstd * mean_grad - slope * mean
        if _exact(x):
            grad_x = torch.addcmul(shift, x, slope).addcmul_(of_groups, scale)
        else:
            grad_x = (of_groups.to(wide) * scale + x.to(wide) * slope + shift).to(x.dtype)
        return grad_x.flatten(1, 2), grad_weight, grad_bias, None, None, None, None, None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return ``[B, C, ...]`` as ``[B, G, c, ...]``."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


def _channel_sums(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sums of ``grad`` and of ``grad * xhat`` of ``[B, C, ...]`` by channel."""
    if not x.numel():
        none = torch.zeros_like(mean).flatten()
        return none, none
    statistics = mean.flatten(), var.flatten()
    _, product, sums = torch.ops.aten.native_batch_norm_backward(
        *(grad, x, torch.ones_like(statistics[0]), *statistics),
        *(None, None, False, eps, [False, True, True]),
    )
    return sums, product


def _exact(x: Tensor) -> bool:
    return x.dtype == dtypes.statistics_dtype(x.dtype)


def _normalized(
    local: Tensor,
    partition: Partition,
    groups: int,
    over_batch: bool,
    weight: Any,
    bias: Any,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Normalize ``[B, C, ...]``; returns it, mean and variance of its groups, and their size."""
    axes, batch = partition.axes, 1 if over_batch else partition.shape[0]
    count = math.prod(partition.shape) // max(1, groups * batch)
    x = _grouped(local, groups)
    dims = [0, *range(2, x.dim())] if over_batch else list(range(2, x.dim()))
    ones = [1] * (x.dim() - 3)
    with torch.no_grad():
        mean, var = moments(x, dims, axes)
    wide = mean.dtype

    def placed(parameter: Any) -> Any:
        if parameter is None:
            return None
        return parameter.to(wide).view(1, groups, -1, *ones)

    out = _GroupedNorm.apply(local, placed(weight), placed(bias), mean, var, eps, dims, count, axes)
    return out, mean, var, count


@rule("batch_norm")
def _batch_norm(
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    partition, local = input._partition, unwrap(input)
    if partition.is_cut(1):
        refuse("batch_norm with channels that are cut")
    if not training:
        weight, bias = (replicated(p, partition.axes) for p in (weight, bias))
        out = func(local, running_mean, running_var, weight, bias, False, momentum, eps)
        return wrap(out, partition)
    channels = partition.shape[1]
    numbers = math.prod(partition.shape) // max(1, channels)
    if numbers <= 1:
        checks.fail("batch_norm", "input", "of several values per channel", partition.shape)
    out, mean, var, count = _normalized(local, partition, channels, True, weight, bias, eps)
    if running_mean is not None and momentum is not None:
        with torch.no_grad():
            unbiased = var.flatten() * (count / (count - 1))
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return wrap(out, partition)


@rule("instance_norm")
def _instance_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    partition, local = input._partition, unwrap(input)
    if not use_input_stats:
        weight, bias = (replicated(p, partition.axes) for p in (weight, bias))
        out = func(local, running_mean, running_var, weight, bias, False, momentum, eps)
        return wrap(out, partition)
    _check_cut("instance_norm", partition)
    channels = partition.shape[1]
    out, mean, var, count = _normalized(local, partition, channels, False, weight, bias, eps)
    if running_mean is not None:
        with torch.no_grad():
            unbiased = var.flatten(1).mean(0) * (count / max(1, count - 1))
            running_mean.lerp_(mean.flatten(1).mean(0).to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return wrap(out, partition)


@rule("group_norm")
def _group_norm(
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    partition = input._partition
    if partition.shape[1] % num_groups:
        checks.fail("group_norm", "channels", f"a multiple of {num_groups}", partition.shape[1])
    _check_cut("group_norm", partition)
    out, *_rest = _normalized(unwrap(input), partition, num_groups, False, weight, bias, eps)
    return wrap(out, partition)


def _check_cut(op: str, partition: Partition) -> None:
    if partition.is_cut(0) or partition.is_cut(1):
        refuse(f"{op} with a batch or channels that are cut")


@rule("layer_norm", "rms_norm")
def _layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float | None = 1e-5,
    *_: Any,
) -> Any:
    partition, is_rms = input._partition, function_name(func) == "rms_norm"
    dims = range(input.dim() - len(normalized_shape), input.dim())
    if axes_of(partition, dims):
        return refuse(f"{function_name(func)} over a cut dim")
    weight, bias = (replicated(p, partition.axes) for p in (weight, bias))
    options = (weight, bias) if is_rms else (weight, bias, eps)
    return wrap(func(unwrap(input), normalized_shape, *options), partition)
