"""Pooling of a cut tensor.

Windows of the outputs follow from their global positions, as those of a convolution do. Averages
are sums divided by counts that follow from the positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks
from fusedops.parallel.spatial.convolution import ConvDim, output_windows, per_dim
from fusedops.parallel.spatial.halo import extend
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.resize import weighted
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    rule,
    unwrap,
    wrap,
)


class _Pooling:
    """The windows of a pooling over the last dims of a tensor."""

    def __init__(
        self, op: str, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
    ) -> None:
        ndim, partition = int(op[-2]), x._partition
        kernels = per_dim(kernel, ndim)
        strides = kernels if stride is None or stride == [] else per_dim(stride, ndim)
        columns = zip(
            kernels, strides, per_dim(padding, ndim), per_dim(dilation, ndim), strict=True
        )
        self.dims = [ConvDim(*column) for column in columns]
        self.lead = x.dim() - ndim
        self.sizes = partition.shape[self.lead :]  # the global extents of the input
        pairs = list(zip(self.dims, self.sizes, strict=True))
        extents = [_outputs(size, dim, ceil) for dim, size in pairs]
        for place, ((dim, size), extent) in enumerate(zip(pairs, extents, strict=True)):
            if dim.padding > dim.kernel // 2:
                checks.fail(op, "padding", f"at most half of the kernel {dim.kernel}", dim.padding)
            if extent < 1:
                checks.fail(op, f"dim {self.lead + place}", "at least one window long", size)
        # The inputs along cut dims, this rank's outputs along all, and the partition of the result.
        self.windows, self.spans, self.result = output_windows(partition, self.dims, extents)

    def extended(self, local: Tensor, fill: float) -> Tensor:
        """Return what this rank pools, padded; differentiable."""
        x = extend(local, self.windows, fill=fill, label="pool")
        cut = {item.dim - self.lead for item in self.windows}
        pads: list[int] = []
        for index in reversed(range(len(self.dims))):
            first, last = self.dims[index].inputs(self.spans[index], self.sizes[index])
            pads += [0, 0] if index in cut else [-first, last - self.sizes[index]]
        return F.pad(x, pads, value=fill) if any(pads) else x

    def divisors(self, include_pad: bool, like: Tensor) -> Tensor:
        """Return the number of values in each window of this rank."""
        result = like.new_ones(())
        for dim, size, span in zip(self.dims, self.sizes, self.spans, strict=True):
            first = torch.arange(*span, device=like.device) * dim.stride - dim.padding
            last = (first + dim.kernel).clamp_max(size + dim.padding)
            if not include_pad:
                first, last = first.clamp_min(0), last.clamp_max(size)
            result = result.unsqueeze(-1) * (last - first).to(like.dtype)
        return result


def _outputs(size: int, dim: ConvDim, ceil: bool) -> int:
    """Return the number of windows; one that starts in the padding behind does not count."""
    rest = size + 2 * dim.padding - dim.reach - 1
    count = (-(-rest // dim.stride) if ceil else rest // dim.stride) + 1
    return count - (ceil and (count - 1) * dim.stride >= size + dim.padding)


class _MaxOfWindows(torch.autograd.Function):
    """Saves the indices of the maxima alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Pooling) -> Tensor:
        ctx.shape, ctx.lead, shape = x.shape, plan.lead, plan.result.local_shape
        if 0 in shape:
            values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
        else:
            values, indices = _max_windows(x, plan.dims)
        ctx.save_for_backward(indices)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        full = grad.new_zeros([*ctx.shape[: ctx.lead], math.prod(ctx.shape[ctx.lead :])])
        full.scatter_add_(-1, indices.flatten(ctx.lead), grad.flatten(ctx.lead))
        return full.view(ctx.shape), None


def _max_windows(x: Tensor, dims: Sequence[ConvDim]) -> tuple[Tensor, Tensor]:
    if len(dims) == 1:
        values, index = _max_windows(x.unsqueeze(-2), [ConvDim(1, 1, 0, 1), *dims])
        return values.squeeze(-2), index.squeeze(-2)
    columns = zip(*((dim.kernel, dim.stride, dim.dilation) for dim in dims), strict=True)
    kernels, strides, dilations = columns
    function = F.max_pool2d if len(dims) == 2 else F.max_pool3d
    return function(x, kernels, strides, 0, dilations, False, return_indices=True)


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    name = function_name(func)
    if return_indices:
        return refuse(f"{name}_with_indices")
    plan = _Pooling(name, input, kernel_size, stride, padding, dilation, ceil_mode)
    extended = plan.extended(unwrap(input), -math.inf)
    return wrap(_MaxOfWindows.apply(extended, plan), plan.result)


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    plan = _Pooling(function_name(func), input, kernel_size, stride, padding, 1, ceil_mode)
    extended = plan.extended(unwrap(input), 0.0)
    if 0 in plan.result.local_shape:
        sums = extended.new_empty(plan.result.local_shape) + 0 * extended.sum()
    else:
        sums = _window_sums(extended, plan.dims)
    if divisor_override is None:
        return wrap(sums / plan.divisors(count_include_pad, sums), plan.result)
    return wrap(sums / divisor_override, plan.result)


def _window_sums(x: Tensor, dims: Sequence[ConvDim]) -> Tensor:
    kernels, strides = [dim.kernel for dim in dims], [dim.stride for dim in dims]
    if len(dims) == 1:
        return F.avg_pool2d(
            x.unsqueeze(-2), (1, *kernels), (1, *strides), divisor_override=1
        ).squeeze(-2)
    function = F.avg_pool2d if len(dims) == 2 else F.avg_pool3d
    return function(x, kernels, strides, divisor_override=1)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg_pool(func: Any, input: Any, output_size: Any) -> Any:
    """Average windows of unequal sizes, dim by dim; one window is a mean over the ranks."""
    ndim = int(function_name(func)[-2])
    lead = input.dim() - ndim
    numbers = per_dim(output_size, ndim)
    targets = [
        size if number is None else number
        for number, size in zip(numbers, input.shape[lead:], strict=True)
    ]
    single = [lead + index for index, target in enumerate(targets) if target == 1]
    x = input.mean(single, True) if single else input
    if not isinstance(x, SpatialTensor):
        return func(x, targets)
    for dim, target in enumerate(targets, start=lead):
        size = input.shape[dim]
        if target in (1, size):
            continue
        spans = [(n * size // target, -(-(n + 1) * size // target)) for n in range(target)]
        taps = max(stop - start for start, stop in spans)
        sources = [[min(start + t, stop - 1) for t in range(taps)] for start, stop in spans]
        weights = [
            [1.0 / (stop - start) if start + t < stop else 0.0 for t in range(taps)]
            for start, stop in spans
        ]
        x = weighted("adaptive_avg_pool", x, dim, sources, weights)
    return x


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(
    func: Any, input: Any, output_size: Any, return_indices: bool = False
) -> Any:
    name, ndim = function_name(func), int(function_name(func)[-2])
    if return_indices:
        return refuse(f"{name}_with_indices")
    if any(number != 1 for number in per_dim(output_size, ndim)):
        return refuse(f"{name} to more than one value")
    return input.amax(list(range(input.dim() - ndim, input.dim())), True)
