"""Normalization with the statistics of the complete tensor.

Every rank computes mean and sum of squares of its part, gathers those of all and merges them, which
loses nothing to cancellation. Saved are the part and the statistics, as on one process; the
backward adds two sums over the ranks.

Batch norm has one group of statistics per channel (over the batch and positions). Group and
instance norm have one per sample and group of channels: they are batch norms of the view
``[1, B * C, ...]``, and use the same kernels.
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
from fusedops.parallel.spatial.halo import memory_format
from fusedops.parallel.spatial.partition import Axis
from fusedops.parallel.spatial.reduce import axes_of
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    all_reduced,
    function_name,
    replicated_all,
    rule,
    unwrap,
    wrap,
)

_aten: Any = torch.ops.aten


def _moments(x: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of ``x [B, C, ...]`` over all ranks."""
    x = x.to(dtypes.statistics_dtype(x.dtype))
    count = x.numel() // max(1, x.shape[1])
    if not count:
        mean = var = x.new_zeros(x.shape[1])
    elif x.is_meta or type(x) is not Tensor:
        var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    else:  # four times as fast as var_mean on a CPU; not implemented for tensors without data
        mean, var = _aten.batch_norm_update_stats(x, None, None, 0.0)
    total = torch.full((1,), float(count), dtype=x.dtype, device=x.device)
    squares = var * count
    for axis in axes:
        sent = torch.cat([total, mean, squares])
        parts = collectives.all_gather(sent, axis.group, label="moments").wait()
        parts = parts.view(axis.size, -1)
        counts, (means, squared) = parts[:, :1], parts[:, 1:].chunk(2, 1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        squares = (squared + (means - mean) ** 2 * counts).sum(0)
    return mean, squares / total


def _batch_view(x: Tensor, over_batch: bool) -> Tensor:
    """Return the view of ``[B, C, ...]`` whose batch norm this is."""
    return x if over_batch else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


class _Normalization(torch.autograd.Function):
    """``(x - mean) * rstd * weight + bias`` of this rank's part ``[B, C, ...]``.

    Mean and variance are those of the groups ``[B or 1, groups, 1]``, weight and bias ``[1, groups,
    channels of a group]``. The result is no view: it may be changed in place without a copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        options: tuple[bool, float, int, tuple[Axis, ...]],
    ) -> Tensor:
        ctx.save_for_backward(local, weight, mean, var)
        ctx.options = options
        over_batch, eps, *_ = options
        x = _batch_view(local, over_batch)
        if not x.numel():
            return torch.empty_like(local)
        sizes = *mean.shape[:2], x.shape[1] // mean.numel()
        channel_mean, channel_var, scale, shift = (
            None if t is None else t.expand(sizes).reshape(-1) for t in (mean, var, weight, bias)
        )
        out = F.batch_norm(x, channel_mean, channel_var, scale, shift, eps=eps)
        if over_batch:
            return out
        out = _aten._unsafe_view(out, local.shape)
        return out.contiguous(memory_format=memory_format(local))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        local, weight, mean, var = ctx.saved_tensors
        over_batch, eps, count, axes = ctx.options
        x, grad = _batch_view(local, over_batch), _batch_view(grad, over_batch)
        sizes = *mean.shape[:2], x.shape[1] // mean.numel()
        statistics = [t.expand(sizes).reshape(-1) for t in (mean, var)]
        # Of grad, and of grad * xhat.
        if x.numel():
            _, product, sums = _aten.native_batch_norm_backward(
                *(grad, x, torch.ones_like(statistics[0]), *statistics),
                *(None, None, False, eps, [False, True, True]),
            )
        else:
            sums = product = torch.zeros_like(statistics[0])
        both = all_reduced(torch.stack([sums, product]), axes, label="norm grad")
        sums, product = both.view(2, *sizes)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_weight = product.sum_to_size((1, *sizes[1:])) if needs_weight else None
        grad_bias = sums.sum_to_size((1, *sizes[1:])) if needs_bias else None
        factor = 1.0 if weight is None else weight
        mean_grad = (sums * factor).sum_to_size(mean.shape) / count
        mean_product = (product * factor).sum_to_size(mean.shape) / count
        rstd = (var + eps).rsqrt()
        slope = -rstd * rstd * mean_product
        shift = -rstd * mean_grad - slope * mean
        scale, slope, shift = (
            t.expand(sizes).reshape(-1, *[1] * (x.dim() - 2)) for t in (rstd * factor, slope, shift)
        )
        if x.dtype == scale.dtype:
            grad_x = torch.addcmul(shift, x, slope).addcmul_(grad, scale)
        else:
            grad_x = (grad.to(scale.dtype) * scale + x.to(scale.dtype) * slope + shift).to(x.dtype)
        return grad_x.view(local.shape), grad_weight, grad_bias, None, None, None


def _normalized(
    op: str, input: Any, num_groups: int, weight: Any, bias: Any, eps: float
) -> tuple[Any, Tensor, Tensor, int]:
    """Normalize ``[B, C, ...]``; returns it, mean and variance of its groups, and their size."""
    partition, local, over_batch = input._partition, unwrap(input), op == "batch_norm"
    if partition.is_cut(1):
        refuse(f"{op} with channels that are cut")
    if partition.is_cut(0) and not over_batch:
        refuse(f"{op} with a batch that is cut")
    groups = num_groups if over_batch else num_groups * partition.shape[0]
    count = math.prod(partition.shape) // max(1, groups)
    if count < (1 if op == "group_norm" else 2):
        checks.fail(op, "input", "of several values per channel", partition.shape)
    with torch.no_grad():
        of_groups = local if over_batch else local.reshape(1, groups, local.numel() // groups)
        mean, var = _moments(of_groups, partition.axes)
        mean, var = mean.view(-1, num_groups, 1), var.view(-1, num_groups, 1)
    weight, bias = (
        None if p is None else p.to(mean.dtype).view(1, num_groups, -1) for p in (weight, bias)
    )
    options = over_batch, eps, count, partition.axes
    out = _Normalization.apply(local, weight, bias, mean, var, options)
    return wrap(out, partition), mean, var, count


@rule("batch_norm", "instance_norm")
def _batch_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
    use_input_stats: bool = True,
) -> Any:
    op, channels = function_name(func), input.shape[1]
    if not (training if training is not None else use_input_stats and op == "instance_norm"):
        weight, bias = replicated_all([weight, bias], input._partition.axes)
        statistics = running_mean, running_var
        out = func(unwrap(input), *statistics, weight, bias, False, momentum, eps)
        return wrap(out, input._partition)
    out, mean, var, count = _normalized(op, input, channels, weight, bias, eps)
    if running_mean is not None:
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
                now = now.mean(0) if len(now) > 1 else now
                running.lerp_(now.view(-1).to(running.dtype), momentum)
    return out


@rule("group_norm")
def _group_norm(
    func: Any, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    if input.shape[1] % num_groups:
        checks.fail("group_norm", "channels", f"a multiple of {num_groups}", input.shape[1])
    return _normalized("group_norm", input, num_groups, weight, bias, eps)[0]


@rule("layer_norm", "rms_norm")
def _layer_norm(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    partition, ndim = input._partition, input.dim()
    if axes_of(partition, range(ndim - len(normalized_shape), ndim)):
        return refuse(f"{function_name(func)} over a cut dim")
    parameters = replicated_all([*args, *kwargs.values()], partition.axes)
    options = dict(zip(kwargs, parameters[len(args) :], strict=True))
    out = func(unwrap(input), normalized_shape, *parameters[: len(args)], **options)
    return wrap(out, partition)
