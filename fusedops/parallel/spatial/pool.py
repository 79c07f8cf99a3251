"""Pooling and interpolation of a cut tensor.

Windows of the outputs follow from their global positions, as those of a convolution do. Averages
are sums divided by counts that follow from the positions. Every output of an interpolation, or of
an average over windows of unequal sizes, is a weighted sum of few rows per dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks
from fusedops._core.device_tensors import to_device
from fusedops.parallel.spatial.convolution import ConvDim, output_windows, per_dim
from fusedops.parallel.spatial.halo import extend, fetch_rows
from fusedops.parallel.spatial.partition import single
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import SpatialTensor, function_name, rule, unwrap, wrap


class _Pooling:
    """The windows of a pooling over the last dims of a tensor."""

    def __init__(
        self, op: str, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
    ) -> None:
        ndim, partition = int(op[-2]), x._partition
        kernels = per_dim(kernel, ndim)
        strides = kernels if stride is None or stride == [] else per_dim(stride, ndim)
        more = per_dim(padding, ndim), per_dim(dilation, ndim)
        self.dims = [ConvDim(*column) for column in zip(kernels, strides, *more, strict=True)]
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
        x = extend(local, self.windows, fill=fill, label="pool", copy=False)
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
            sizes = zip(
                *((dim.kernel, dim.stride, 0, dim.dilation) for dim in plan.dims), strict=True
            )
            pool = getattr(F, f"max_pool{len(plan.dims)}d")
            values, indices = pool(x, *sizes, return_indices=True)
        ctx.save_for_backward(indices)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        full = grad.new_zeros([*ctx.shape[: ctx.lead], math.prod(ctx.shape[ctx.lead :])])
        full.scatter_add_(-1, indices.flatten(ctx.lead), grad.flatten(ctx.lead))
        return full.view(ctx.shape), None


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
    name = function_name(func)
    plan = _Pooling(name, input, kernel_size, stride, padding, 1, ceil_mode)
    extended = plan.extended(unwrap(input), 0.0)
    if 0 in plan.result.local_shape:
        sums = extended.new_empty(plan.result.local_shape) + extended[:0].sum()
    else:
        kernels, strides = zip(*((dim.kernel, dim.stride) for dim in plan.dims), strict=True)
        if len(kernels) == 1:  # torch has no sums of windows of one dim
            extended, kernels, strides = extended.unsqueeze(-1), (*kernels, 1), (*strides, 1)
        pool = F.avg_pool3d if len(kernels) == 3 else F.avg_pool2d
        sums = pool(extended, kernels, strides, divisor_override=1)
        sums = sums.squeeze(-1) if name == "avg_pool1d" else sums
    if divisor_override is None:
        return wrap(sums / plan.divisors(count_include_pad, sums), plan.result)
    return wrap(sums / divisor_override, plan.result)


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
        counts = [stop - start for start, stop in spans]
        taps = max(counts)
        sources = [[min(start + t, stop - 1) for t in range(taps)] for start, stop in spans]
        weights = [[(tap < count) / count for tap in range(taps)] for count in counts]
        x = _weighted("adaptive_avg_pool", x, dim, sources, weights)
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


def _weighted(op: str, x: Any, dim: int, sources: Any, weights: Any | None) -> Any:
    """Return weighted sums of the rows of one dim, cut or not.

    ``sources [outputs, taps]`` are rows of the complete tensor. ``weights`` have the same shape;
    without them the rows of one tap are copied.
    """
    partition, local = x._partition, unwrap(x)
    sources = torch.as_tensor(sources)
    count = sources.shape[0]
    cut = partition.cuts[dim]
    start, offset, resized = 0, 0, None
    if cut is not None:
        resized = cut.resized(count)
        start, stop = resized.own
        spans = []
        for a, b in resized.spans():
            part = sources[a:b]
            spans.append((int(part.min()), int(part.max()) + 1) if a < b else (0, 0))
        local = fetch_rows(local, dim, cut, single(spans), label=op)
        offset = spans[cut.axis.rank][0]
        sources = sources[start:stop]
    sources = (sources - offset).to(local.device)
    if weights is None:
        out = local.index_select(dim, sources[:, 0])
    else:
        weights = to_device(torch.as_tensor(weights, dtype=local.dtype), local.device)
        weights = weights[start : start + len(sources)]
        view = [-1 if d == dim else 1 for d in range(local.dim())]
        out = None
        for tap in range(sources.shape[1]):
            term = local.index_select(dim, sources[:, tap]) * weights[:, tap].view(view)
            out = term if out is None else out + term
    return wrap(out, partition.replaced(dim, count, resized))


def _positions(
    size: int, count: int, scale: float | None, mode: str, align: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the rows and weights of all outputs of one dim, as torch computes them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if mode in ("nearest", "nearest-exact"):
        ramp = torch.arange(size, dtype=wide).view(1, 1, -1)
        if scale is None:
            picked = F.interpolate(ramp, size=count, mode=mode)
        else:
            picked = F.interpolate(ramp, scale_factor=scale, mode=mode)
        return picked.view(-1, 1).long(), None
    outputs = torch.arange(count, dtype=wide)
    if align:
        source = outputs * ((size - 1) / (count - 1) if count > 1 else 0.0)
    else:
        ratio = size / count if scale is None else 1.0 / scale
        source = (outputs + 0.5) * ratio - 0.5
    source = source.clamp_min(0.0)
    first = source.floor().clamp_max(size - 1)
    part = source - first
    taps = torch.stack([first, (first + 1).clamp_max(size - 1)], 1).long()
    return taps, torch.stack([1 - part, part], 1)


@rule("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")
def _interpolate(
    func: Any,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    if antialias:
        return refuse("interpolate with antialias=True")
    ndim = input.dim() - 2
    if (size is None) == (scale_factor is None):
        checks.fail("interpolate", "one of size and scale_factor", "given", "both or none")
    numbers = per_dim(scale_factor if size is None else size, ndim)
    shape, scales = input.shape[2:], [None] * ndim
    if size is None:
        scales = scales if recompute_scale_factor else numbers
        numbers = [math.floor(n * factor) for n, factor in zip(shape, numbers, strict=True)]
    if mode == "area":
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
        return pool[ndim - 1](input, numbers)
    if mode not in ("linear", "bilinear", "trilinear", "nearest", "nearest-exact"):
        return refuse(f"interpolate with mode {mode!r}")
    x = input
    for index, (count, scale) in enumerate(zip(numbers, scales, strict=True)):
        if count < 1:
            checks.fail("interpolate", "the output size", "at least 1", count)
        if count == shape[index] and scale in (None, 1.0):
            continue
        taps, weights = _positions(
            shape[index], count, scale, mode, bool(align_corners), input.dtype
        )
        x = _weighted("interpolate", x, 2 + index, taps, weights)
    return x
