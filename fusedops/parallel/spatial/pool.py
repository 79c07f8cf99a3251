"""Pooling and unpooling of a cut tensor, with the indices of the complete one.

Windows of the outputs follow from their global positions, as those of a convolution do. Averages
are sums divided by counts that follow from the positions. Indices count positions of the complete
tensor, as torch's do, so that ``max_unpool`` may get them on any cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks
from fusedops.parallel.spatial.conv_autograd import ConvDim
from fusedops.parallel.spatial.convolution import per_dim
from fusedops.parallel.spatial.halo import (
    Halo,
    HaloGradient,
    Window,
    extend,
    split_gradient,
    window,
)
from fusedops.parallel.spatial.partition import Factor, Interval, Partition
from fusedops.parallel.spatial.resize import weighted
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    refuse,
    rule,
    unwrap,
    wrap,
)


def _outputs(size: int, dim: ConvDim, ceil: bool) -> int:
    """Return the number of windows; one that starts in the padding behind does not count."""
    rest = size + 2 * dim.low - dim.reach - 1
    count = (-(-rest // dim.stride) if ceil else rest // dim.stride) + 1
    if ceil and (count - 1) * dim.stride >= size + dim.low:
        count -= 1
    return count


class _Pooling:
    """The windows of a pooling over the last dims of a tensor.

    All spatial dims are windows here, those that are not cut as well, with one rank's span.
    """

    def __init__(self, op: str, x: Any, dims: Sequence[ConvDim], ceil: bool) -> None:
        partition: Partition = x._partition
        self.lead = x.dim() - len(dims)
        self.windows: list[Window] = []
        self.starts: list[int] = []  # of this rank's outputs
        self.counts: list[int] = []  # the number of them
        self.inputs: list[Interval] = []  # positions of what this rank pools
        self.sizes = list(partition.shape[self.lead :])
        self.dims = list(dims)
        result = partition
        for index, (dim, size) in enumerate(zip(dims, self.sizes, strict=True)):
            if dim.low > dim.kernel // 2:
                checks.fail(op, "padding", f"at most half of the kernel {dim.kernel}", dim.low)
            count = _outputs(size, dim, ceil)
            if count < 1:
                checks.fail(op, f"dim {self.lead + index}", "at least one window long", size)
            cut = partition.cut(op, self.lead + index)
            if cut is None:
                start, stop = 0, count
                result = result.replaced(self.lead + index, Factor(count))
            else:
                moved = cut.resized(count)
                spans = tuple(dim.inputs(span, size) for span in moved.spans())
                self.windows.append(window(self.lead + index, cut, spans))
                start, stop = moved.own
                result = result.replaced(self.lead + index, Factor(count, moved))
            self.starts.append(start)
            self.counts.append(stop - start)
            self.inputs.append(dim.inputs((start, stop), size))
        self.result = result

    def pads(self) -> list[int]:
        """Return the ``F.pad`` amounts of dims that are not cut."""
        cut = {item.dim for item in self.windows}
        amounts: list[int] = []
        for index in reversed(range(len(self.dims))):
            first, last = self.inputs[index]
            size = self.sizes[index]
            amounts += [0, 0] if index + self.lead in cut else [-first, last - size]
        return amounts

    @property
    def empty(self) -> bool:
        """Whether this rank has no outputs."""
        return 0 in self.counts

    def extended(self, local: Tensor, fill: float) -> Tensor:
        """Return what this rank pools, padded; differentiable."""
        x = extend(local, self.windows, fill=fill, label="pool")
        return F.pad(x, self.pads(), value=fill) if any(self.pads()) else x

    def divisors(self, include_pad: bool, like: Tensor) -> Tensor:
        """Return the number of values in each window of this rank."""
        result = like.new_ones(())
        for dim, size, start, count in zip(
            self.dims, self.sizes, self.starts, self.counts, strict=True
        ):
            first = torch.arange(start, start + count, device=like.device) * dim.stride - dim.low
            last = (first + dim.kernel).clamp_max(size + dim.low)
            if not include_pad:
                first, last = first.clamp_min(0), last.clamp_max(size)
            result = result.unsqueeze(-1) * (last - first).to(like.dtype)
        return result


class _MaxPool(torch.autograd.Function):
    """Values and, if asked for, global indices; saves the indices of the maxima alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Pooling, has_index: bool) -> Any:
        halo = Halo(x, plan.windows, fill=-math.inf, label="pool")
        halo.exchange()
        extended = halo.everything()
        if any(plan.pads()):
            extended = F.pad(extended, plan.pads(), value=-math.inf)
        ctx.plan, ctx.shape = plan, extended.shape
        shape = [*x.shape[: plan.lead], *plan.counts]
        if plan.empty or 0 in shape:
            values, local = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
        else:
            values, local = _max_windows(extended, plan.dims)
        ctx.save_for_backward(local)
        if not has_index:
            return values, None
        index = _global_indices(local, extended.shape[plan.lead :], plan)
        ctx.mark_non_differentiable(index)
        return values, index

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (local,) = ctx.saved_tensors
        plan: _Pooling = ctx.plan
        full = grad.new_zeros([*ctx.shape[: plan.lead], math.prod(ctx.shape[plan.lead :])])
        full.scatter_add_(-1, local.flatten(plan.lead), grad.flatten(plan.lead))
        full = full.view(ctx.shape)
        if any(plan.pads()):
            full = F.pad(full, [-amount for amount in plan.pads()])
        own, parts = split_gradient(full, plan.windows)
        back = HaloGradient(own, parts, plan.windows, label="pool grad")
        return back.finish(own), None, None


def _max_windows(x: Tensor, dims: Sequence[ConvDim]) -> tuple[Tensor, Tensor]:
    arguments = [dim.kernel for dim in dims], [dim.stride for dim in dims]
    dilation = [dim.dilation for dim in dims]
    if len(dims) == 1:
        values, index = _max_windows(x.unsqueeze(-2), [ConvDim(1, 1, 0, 0, 1), *dims])
        return values.squeeze(-2), index.squeeze(-2)
    function = F.max_pool2d if len(dims) == 2 else F.max_pool3d
    return function(x, *arguments, 0, dilation, False, return_indices=True)


def _global_indices(local: Tensor, shape: Sequence[int], plan: _Pooling) -> Tensor:
    """Return indices into the complete tensor of indices into what a rank has pooled."""
    result = torch.zeros_like(local)
    stride = 1
    for size, full, span in reversed(list(zip(shape, plan.sizes, plan.inputs, strict=True))):
        place = local % max(1, size) + span[0]
        local = local // max(1, size)
        result += place.clamp(0, full - 1) * stride
        stride *= full
    return result


@rule(
    *(f"{name}{n}d" for name in ("max_pool", "_max_pool") for n in (1, 2, 3)),
    *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)),
)
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
    ndim = int(name[name.index("d", 6) - 1])
    sizes = _dims(ndim, kernel_size, stride, padding, dilation)
    plan = _Pooling(name, input, sizes, ceil_mode)
    has_index = return_indices or name.endswith("indices")
    values, index = _MaxPool.apply(unwrap(input), plan, has_index)
    values = wrap(values, plan.result)
    return (values, wrap(index, plan.result)) if has_index else values


def _dims(ndim: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[ConvDim]:
    kernels = per_dim(kernel, ndim)
    strides = kernels if stride is None or stride == [] else per_dim(stride, ndim)
    more = per_dim(padding, ndim), per_dim(dilation, ndim)
    columns = zip(kernels, strides, *more, strict=True)
    return [ConvDim(k, s, p, p, d) for k, s, p, d in columns]


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
    ndim = int(name[-2])
    plan = _Pooling(name, input, _dims(ndim, kernel_size, stride, padding, 1), ceil_mode)
    local = unwrap(input)
    extended = plan.extended(local, 0.0)
    if plan.empty:
        shape = [*local.shape[: plan.lead], *plan.counts]
        sums = extended.new_empty(shape) + 0 * extended.sum()
    else:
        sums = _window_sums(extended, plan.dims)
    divisor: Any = divisor_override
    if divisor is None:
        divisor = plan.divisors(count_include_pad, sums)
    return wrap(sums / divisor, plan.result)


def _window_sums(x: Tensor, dims: Sequence[ConvDim]) -> Tensor:
    kernels, strides = [dim.kernel for dim in dims], [dim.stride for dim in dims]
    if len(dims) == 1:
        return F.avg_pool2d(
            x.unsqueeze(-2), (1, *kernels), (1, *strides), divisor_override=1
        ).squeeze(-2)
    function = F.avg_pool2d if len(dims) == 2 else F.avg_pool3d
    return function(x, kernels, strides, divisor_override=1)


@rule("lp_pool1d", "lp_pool2d", "lp_pool3d")
def _lp_pool(
    func: Any,
    input: Any,
    norm_type: float,
    kernel_size: Any,
    stride: Any = None,
    ceil_mode: bool = False,
) -> Any:
    ndim = int(function_name(func)[-2])
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[ndim - 1]
    mean = pool(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    count = math.prod(per_dim(kernel_size, ndim))
    return (torch.sign(mean) * F.relu(torch.abs(mean)) * count).pow(1.0 / norm_type)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg_pool(func: Any, input: Any, output_size: Any) -> Any:
    """Average windows of unequal sizes; one window is a mean over the ranks."""
    ndim = int(function_name(func)[-2])
    lead = input.dim() - ndim
    numbers = per_dim(output_size, ndim)
    targets = [
        size if number is None else number
        for number, size in zip(numbers, input.shape[lead:], strict=True)
    ]
    single = [lead + i for i, target in enumerate(targets) if target == 1]
    x = input.mean(single, True) if single else input
    for index, target in enumerate(targets):
        dim = lead + index
        if target == 1 or not isinstance(x, SpatialTensor) or not x._partition.is_cut(dim):
            continue
        size = input.shape[dim]
        spans = [_bin(place, size, target) for place in range(target)]
        taps = max(stop - start for start, stop in spans)
        sources = [[min(start + t, stop - 1) for t in range(taps)] for start, stop in spans]
        weights = [
            [1.0 / (stop - start) if start + t < stop else 0.0 for t in range(taps)]
            for start, stop in spans
        ]
        x = weighted("adaptive_avg_pool", x, dim, sources, weights)
    rest: list[Any] = [
        target if not isinstance(x, SpatialTensor) or not x._partition.is_cut(lead + i) else None
        for i, target in enumerate(targets)
    ]
    local, has = unwrap(x), isinstance(x, SpatialTensor)
    if not has:
        return func(x, targets)
    local_sizes = [s if r is None else r for r, s in zip(rest, local.shape[lead:], strict=True)]
    if local.numel():
        local = func(local, local_sizes)
    else:
        local = local.new_empty([*local.shape[:lead], *local_sizes]) + 0 * local.sum()
    partition = x._partition
    for index, number in enumerate(rest):
        if number is not None:
            partition = partition.replaced(lead + index, Factor(number))
    return wrap(local, partition)


def _bin(place: int, size: int, target: int) -> Interval:
    return place * size // target, -(-(place + 1) * size // target)


@rule(*(f"{name}{n}d" for name in ("adaptive_max_pool", "_adaptive_max_pool") for n in (1, 2, 3)))
def _adaptive_max_pool(
    func: Any, input: Any, output_size: Any, return_indices: bool = False
) -> Any:
    name = function_name(func)
    ndim = int(name[-2])
    numbers = per_dim(output_size, ndim)
    if return_indices:
        return refuse(f"{name} with return_indices")
    lead = input.dim() - ndim
    x = input
    for index, target in enumerate(numbers):
        dim, size = lead + index, input.shape[lead + index]
        if target is None or target == size:
            continue
        bins = [_bin(place, size, target) for place in range(target)]
        rows = [x.narrow(dim, start, stop - start).amax(dim, True) for start, stop in bins]
        x = torch.cat(rows, dim) if len(rows) > 1 else rows[0]
    return x


@rule(*(f"adaptive_max_pool{n}d_with_indices" for n in (1, 2, 3)))
def _adaptive_indices(func: Any, *args: Any, **kwargs: Any) -> Any:
    return refuse(function_name(func))


@rule("max_unpool1d", "max_unpool2d", "max_unpool3d")
def _max_unpool(
    func: Any,
    input: Any,
    indices: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
) -> Any:
    """Write values to their places: each rank those that fall in its part of the result."""
    name = function_name(func)
    ndim = int(name[-2])
    lead = input.dim() - ndim
    sizes = _dims(ndim, kernel_size, stride, padding, 1)
    if not isinstance(indices, SpatialTensor) or indices._partition != input._partition:
        refuse(f"{name} with indices that are cut in another way than the values")
    partition = input._partition
    shape = [
        (size - 1) * dim.stride - 2 * dim.low + dim.kernel
        for size, dim in zip(input.shape[lead:], sizes, strict=True)
    ]
    if output_size is not None:
        shape = [int(size) for size in output_size][-ndim:]
    windows, result, spans = [], partition, []
    for index, (dim, size) in enumerate(zip(sizes, shape, strict=True)):
        cut = partition.cut(name, lead + index)
        if cut is None:
            spans.append((0, size))
            result = result.replaced(lead + index, Factor(size))
            continue
        moved = cut.resized(size)
        # The values whose windows reach these places: the inputs of a transposed convolution.
        reach = ConvDim(dim.kernel, dim.stride, dim.low, dim.low, 1, 0, True)
        needed = tuple(reach.inputs(span, cut.size) for span in moved.spans())
        windows.append(window(lead + index, cut, needed))
        spans.append(moved.own)
        result = result.replaced(lead + index, Factor(size, moved))
    values = extend(unwrap(input), windows, label="unpool")
    places = extend(unwrap(indices), windows, label="unpool")
    local_shape = [stop - start for start, stop in spans]
    inside = torch.ones_like(places, dtype=torch.bool)
    target = torch.zeros_like(places)
    rest, stride = places, 1
    for (start, stop), size in reversed(list(zip(spans, shape, strict=True))):
        place = rest % size
        rest = rest // size
        inside = inside & (place >= start) & (place < stop)
        target = target + (place - start) * stride
        stride *= stop - start
    flat = math.prod(local_shape)
    target = torch.where(inside, target, flat)  # one more place for the others' values
    out = values.new_zeros([*values.shape[:lead], flat + 1])
    out = out.scatter(-1, target.flatten(lead), values.flatten(lead))
    return wrap(out[..., :flat].unflatten(-1, local_shape), result)
