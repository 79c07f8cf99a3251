"""Convolution of a cut tensor: each rank computes the outputs of its part of the result.

The result's cut follows from its extent (``Cut.resized``), and the inputs that a rank needs from
the positions of its outputs, ``[o0 * stride - padding, (o1 - 1) * stride - padding + dilation *
(kernel - 1)]``, for any stride, dilation and padding. A transposed convolution needs the inputs
that reach its outputs. Outputs that need no halo are computed while the halo of the first dim
travels, those at the edges of a dim while the next one's does. Saved are the part itself and the
received rows; in the backward gradients of the halo travel while the weight's is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks, dtypes
from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial.halo import Box, Halo, HaloGradient, Window, memory_format
from fusedops.parallel.spatial.partition import Factor, Interval, Partition
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    replicated,
    rule,
    unsupported,
    unwrap,
    wrap,
)

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class ConvDim:
    """The sizes of one spatial dim.

    Attributes:
        kernel: of the weight.
        stride: of the outputs.
        low: rows of zeros before the input.
        high: those behind it.
        dilation: of the kernel.
        extra: ``output_padding`` of a transposed convolution.
        transposed: whether it is one.
    """

    kernel: int
    stride: int
    low: int
    high: int
    dilation: int
    extra: int = 0
    transposed: bool = False

    @property
    def reach(self) -> int:
        """The distance of the first and the last tap."""
        return self.dilation * (self.kernel - 1)

    def output(self, size: int) -> int:
        """Return the extent of the result."""
        if self.transposed:
            return (size - 1) * self.stride - self.low - self.high + self.reach + self.extra + 1
        return (size + self.low + self.high - self.reach - 1) // self.stride + 1

    def inputs(self, span: Interval, size: int) -> Interval:
        """Return the inputs of some outputs; of a convolution, with padding."""
        start, stop = span
        if start >= stop:
            return 0, 0
        if not self.transposed:
            first = start * self.stride - self.low
            return first, (stop - 1) * self.stride - self.low + self.reach + 1
        first = -((self.reach - start - self.low) // self.stride)
        last = (stop - 1 + self.low) // self.stride
        return max(0, min(first, size)), max(0, min(last + 1, size))

    def outputs(self, span: Interval, within: Interval) -> Interval:
        """Return those of some outputs whose inputs lie in a span."""
        first = -(-(span[0] + self.low) // self.stride)
        last = (span[1] + self.low - self.reach - 1) // self.stride
        start, stop = max(first, within[0]), min(last + 1, within[1])
        return (start, stop) if start < stop else (within[0], within[0])

    def reached(self, span: Interval) -> Interval:
        """Return the outputs that inputs of a transposed convolution reach."""
        first = span[0] * self.stride - self.low
        return first, (span[1] - 1) * self.stride - self.low + self.reach + 1


@dataclass(frozen=True)
class ConvPlan:
    """What a rank computes.

    Attributes:
        windows: the inputs that it needs along the cut dims.
        spans: its outputs along them, by dim of the tensor.
        dims: the sizes of all spatial dims; those of cut ones have their padding in the window.
        groups: of the channels.
        shape: of its part of the result.
    """

    windows: tuple[Window, ...]
    spans: dict[int, Interval]
    dims: tuple[ConvDim, ...]
    groups: int
    shape: tuple[int, ...]

    @property
    def transposed(self) -> bool:
        """Whether the convolution is transposed."""
        return self.dims[0].transposed

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of ``aten::convolution`` behind the bias."""
        cut = {window.dim - 2 for window in self.windows}
        padding = [0 if i in cut else dim.low for i, dim in enumerate(self.dims)]
        extra = [0 if i in cut else dim.extra for i, dim in enumerate(self.dims)]
        strides = [dim.stride for dim in self.dims]
        dilations = [dim.dilation for dim in self.dims]
        return strides, padding, dilations, self.transposed, extra, self.groups

    def crop(self) -> list[int]:
        """Return the ``F.pad`` amounts from what is computed to this rank's outputs."""
        amounts: list[int] = []
        by_dim = {window.dim: window for window in self.windows}
        for index in reversed(range(len(self.dims))):
            window = by_dim.get(index + 2)
            if window is None:
                amounts += [0, 0]
                continue
            full, own = self.dims[index].reached(window.inside), self.spans[window.dim]
            amounts += [full[0] - own[0], own[1] - full[1]]
        return amounts


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
        halo = Halo(x, plan.windows)
        out = _forward(halo, weight, bias, plan)
        counts = [len(parts) for parts in halo.received]
        ctx.plan, ctx.counts, ctx.has_bias = plan, counts, bias is not None
        ctx.save_for_backward(x, weight, *(part for parts in halo.received for part in parts))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, *parts = ctx.saved_tensors
        plan: ConvPlan = ctx.plan
        halo = Halo(x, plan.windows)
        halo.received = [[parts.pop(0) for _ in range(count)] for count in ctx.counts]
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        extended = halo.everything()
        empty = grad.numel() == 0 or extended.numel() == 0
        full = (
            F.pad(grad, [-amount for amount in plan.crop()])
            if plan.transposed and not empty
            else grad
        )

        def gradient(*mask: bool) -> Any:
            return _aten.convolution_backward(
                full, extended, weight, None, *plan.arguments(), list(mask)
            )

        back = grad_x = grad_weight = None
        if needs_x:
            grad_extended = torch.zeros_like(extended) if empty else gradient(True, False, False)[0]
            back = HaloGradient(grad_extended, plan.windows, shared=False)
            back.start()
        if needs_weight:
            with collectives.computing("conv weight"):
                grad_weight = torch.zeros_like(weight) if empty else gradient(False, True, False)[1]
        grad_bias = None
        if needs_bias:
            grad_bias = grad.sum((0, *range(2, grad.dim())))
        if back is not None:
            grad_x = back.finish()
        return grad_x, grad_weight, grad_bias, None


def _forward(halo: Halo, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    if plan.transposed:
        halo.exchange()
        return _transposed(halo, weight, bias, plan)
    levels = len(plan.windows)
    dims = {window.dim: plan.dims[window.dim - 2] for window in plan.windows}
    interior = {
        window.dim: dims[window.dim].outputs(window.cut.own, plan.spans[window.dim])
        for window in plan.windows
    }
    if halo.x.device.type == "cpu" or not _worthwhile(interior, plan):
        halo.exchange()
        return _computed(halo, plan.spans, weight, bias, plan)
    out: Tensor | None = None
    halo.start(0)
    for box, level in _boxes(interior, plan):
        halo.advance(level)
        with collectives.computing("conv interior" if level == 0 else "conv edge"):
            part = _computed(halo, box, weight, bias, plan)
        if out is None:
            kind = memory_format(part)
            out = torch.empty(plan.shape, dtype=part.dtype, device=part.device, memory_format=kind)
        target = out
        for dim, (start, stop) in box.items():
            target = target.narrow(dim, start - plan.spans[dim][0], stop - start)
        target.copy_(part)
    halo.advance(levels)
    assert out is not None
    return out


def _worthwhile(interior: Box, plan: ConvPlan) -> bool:
    """Whether at least half of the outputs need no halo, and some outputs do need one."""
    if not interior or all(plan.spans[dim] == span for dim, span in interior.items()):
        return False
    share = 1.0
    for dim, (start, stop) in interior.items():
        first, last = plan.spans[dim]
        share *= (stop - start) / max(1, last - first)
    return share >= 0.5


def _boxes(interior: Box, plan: ConvPlan) -> list[tuple[Box, int]]:
    """Return boxes of outputs, and how many dims must have arrived for them."""
    boxes = [(dict(interior), 0)]
    names = list(interior)
    for level, dim in enumerate(names):
        (start, stop), (first, last) = interior[dim], plan.spans[dim]
        for edge in ((first, start), (stop, last)):
            if edge[0] < edge[1]:
                box = {name: plan.spans[name] for name in names[:level]}
                box[dim] = edge
                box.update({name: interior[name] for name in names[level + 1 :]})
                boxes.append((box, level + 1))
    return boxes


def _computed(halo: Halo, box: Box, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    """Return a box of outputs."""
    if any(start >= stop for start, stop in box.values()) or 0 in plan.shape:
        return halo.x.new_empty(plan.shape)
    needed = {
        window.dim: plan.dims[window.dim - 2].inputs(box[window.dim], window.cut.size)
        for window in plan.windows
    }
    return _aten.convolution(halo.box(needed), weight, bias, *plan.arguments())


def _transposed(halo: Halo, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    extended = halo.everything()
    if 0 in plan.shape:
        return extended.new_empty(plan.shape)
    if extended.numel() == 0:
        out = extended.new_zeros(plan.shape)
        return out if bias is None else out + bias.view(-1, *[1] * len(plan.dims))
    full = _aten.convolution(extended, weight, None, *plan.arguments())
    out = F.pad(full, plan.crop())
    return out if bias is None else out + bias.view(-1, *[1] * len(plan.dims))


def convolution(
    op: str,
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    dims: Sequence[ConvDim],
    groups: int,
) -> Any:
    """Return the convolution of a SpatialTensor ``[B, C, ...]``."""
    partition: Partition = x._partition
    if partition.is_cut(1):
        unsupported(f"{op} reads all channels, and dim 1 is cut; scatter spatial dims")
    local, axes = unwrap(x), partition.axes
    weight = replicated(unwrap(weight), axes)
    bias = replicated(unwrap(bias), axes)
    lower = dtypes.autocast_dtype(local.device)
    if lower is not None and local.dtype != torch.float64:
        local, weight = local.to(lower), weight.to(lower)
        bias = bias if bias is None else bias.to(lower)
    channels = weight.shape[1] * groups if dims[0].transposed else weight.shape[0]
    result = partition.replaced(1, Factor(channels))
    windows, spans = [], {}
    for index, sizes in enumerate(dims):
        dim = index + 2
        size = partition.shape[dim]
        extent = sizes.output(size)
        if extent < 1:
            checks.fail(
                op, f"dim {dim}", f"at least {sizes.reach + 1} with its padding", f"{size} rows"
            )
        cut = partition.cut(op, dim)
        if cut is None:
            result = result.replaced(dim, Factor(extent))
            continue
        moved = cut.resized(extent)
        needed = tuple(sizes.inputs(span, size) for span in moved.spans())
        windows.append(Window(dim, cut, needed))
        spans[dim] = moved.own
        result = result.replaced(dim, Factor(extent, moved))
    plan = ConvPlan(tuple(windows), spans, tuple(dims), groups, result.local_shape)
    cast = nullcontext() if lower is None else torch.autocast(local.device.type, enabled=False)
    with cast:
        out = _Conv.apply(local, weight, bias, plan)
    return wrap(out, result)


def per_dim(value: Any, ndim: int) -> list[int]:
    """Return an argument of torch as one number for each dim."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * ndim if len(numbers) == 1 else numbers


@rule("conv1d", "conv2d", "conv3d")
def _conv(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    op = func.__name__
    if not isinstance(input, SpatialTensor):
        unsupported(f"{op}: its weight is cut and its input is not; spatial.scatter the input")
    ndim = int(op[-2])
    kernels = weight.shape[2:]
    strides, dilations = per_dim(stride, ndim), per_dim(dilation, ndim)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, kernels, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
        if any(number != 1 for number in strides):
            checks.fail(op, "stride", "1 with padding='same'", stride)
    else:
        pads = [(p, p) for p in per_dim(0 if padding == "valid" else padding, ndim)]
    dims = [
        ConvDim(k, s, low, high, d)
        for k, s, (low, high), d in zip(kernels, strides, pads, dilations, strict=True)
    ]
    return _batched(op, input, weight, bias, dims, groups)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    op = func.__name__
    ndim = int(op[-2])
    arguments = (stride, padding, output_padding, dilation)
    columns = zip(weight.shape[2:], *(per_dim(a, ndim) for a in arguments), strict=True)
    dims = [ConvDim(k, s, p, p, d, extra, True) for k, s, p, extra, d in columns]
    for dim in dims:
        if dim.extra >= max(dim.stride, dim.dilation):
            checks.fail(op, "output_padding", "smaller than stride or dilation", output_padding)
    return _batched(op, input, weight, bias, dims, groups)


def _batched(op: str, x: Any, weight: Any, bias: Any, dims: list[ConvDim], groups: int) -> Any:
    """Add the batch of an input without one, and asymmetric zeros of dims that are not cut."""
    single = x.dim() == len(dims) + 1
    if single:
        x = x.unsqueeze(0)
    for index, dim in enumerate(dims):
        if dim.low != dim.high and not x._partition.is_cut(index + 2):
            amounts = [0, 0] * (len(dims) - 1 - index) + [dim.low, dim.high]
            x = F.pad(x, amounts)
            dims[index] = ConvDim(dim.kernel, dim.stride, 0, 0, dim.dilation)
    out = convolution(op, x, weight, bias, dims, groups)
    return out.squeeze(0) if single else out
