"""Convolution of a cut tensor: each rank computes the outputs of its part of the result.

The result's cut follows from its extent (``Cut.resized``), and the inputs that a rank needs from
the positions of its outputs, ``[o0 * stride - padding, (o1 - 1) * stride - padding + dilation *
(kernel - 1)]``, for any stride, dilation and padding. A transposed convolution needs the inputs
that reach its outputs.

Where symmetric padding gives a rank its outputs, it convolves its own part with zeros in place of
the halo while the halo travels, and computes the outputs at the edges again when it is there. The
part is never copied. In the backward, the gradients of the received rows are computed first, and
travel while those of the own part are computed. Otherwise (even kernels, parts without rows,
transposed convolutions) the part is copied with its halo. Saved are the part and the received rows.
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
from fusedops.parallel.spatial.halo import (
    Box,
    Halo,
    Window,
    narrowed,
    own_box,
    read,
    received_boxes,
    return_gradients,
    span_window,
)
from fusedops.parallel.spatial.partition import Axis, Interval, Partition, overlap
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import SpatialTensor, gradient_sum, rule, unwrap, wrap

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class ConvDim:
    """The sizes of one spatial dim of a convolution or pooling."""

    kernel: int
    stride: int
    padding: int  # rows of zeros before the input, and as many behind it
    dilation: int
    extra: int = 0  # ``output_padding`` of a transposed convolution
    transposed: bool = False

    @property
    def reach(self) -> int:
        """The distance of the first and the last tap."""
        return self.dilation * (self.kernel - 1)

    def output(self, size: int) -> int:
        """Return the extent of the result."""
        if self.transposed:
            return (size - 1) * self.stride - 2 * self.padding + self.reach + self.extra + 1
        return (size + 2 * self.padding - self.reach - 1) // self.stride + 1

    def inputs(self, span: Interval, size: int) -> Interval:
        """Return the inputs of some outputs; of a convolution, with padding."""
        start, stop = span
        if start >= stop:
            return 0, 0
        if not self.transposed:
            first = start * self.stride - self.padding
            return first, (stop - 1) * self.stride - self.padding + self.reach + 1
        first = -((self.reach - start - self.padding) // self.stride)
        last = (stop - 1 + self.padding) // self.stride
        return max(0, min(first, size)), max(0, min(last + 1, size))

    def outputs(self, span: Interval, within: Interval) -> Interval:
        """Return those of some outputs whose inputs lie in a span."""
        first = -(-(span[0] + self.padding) // self.stride)
        last = (span[1] + self.padding - self.reach - 1) // self.stride
        return overlap((first, last + 1), within) or (within[0], within[0])

    def touched(self, span: Interval, within: Interval) -> Interval:
        """Return those of some outputs that read an input of a span."""
        first = -(-(span[0] + self.padding - self.reach) // self.stride)
        last = (span[1] - 1 + self.padding) // self.stride
        return overlap((first, last + 1), within) or (within[0], within[0])


@dataclass(frozen=True)
class ConvPlan:
    """What a rank computes."""

    windows: tuple[Window, ...]  # the inputs that it needs along the cut dims
    spans: Box  # its outputs along them
    dims: Sequence[ConvDim]  # of all spatial dims
    groups: int
    shape: tuple[int, ...]  # of its part of the result
    axes: tuple[Axis, ...]  # over which weight and bias are replicated

    def arguments(self, padding: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return the arguments of ``aten::convolution`` behind the bias."""
        cut = {window.dim - 2 for window in self.windows}
        if padding is None:  # of a part that has its halo and its zeros along the cut dims
            padding = [0 if index in cut else dim.padding for index, dim in enumerate(self.dims)]
        extra = [0 if index in cut else dim.extra for index, dim in enumerate(self.dims)]
        strides, dilations = zip(*((dim.stride, dim.dilation) for dim in self.dims), strict=True)
        return strides, padding, dilations, self.dims[0].transposed, extra, self.groups

    def inputs(self, outputs: Box) -> Box:
        """Return the inputs of a box of outputs along the cut dims, with padding."""
        sizes = {window.dim: window.cut.size for window in self.windows}
        return {dim: self.dims[dim - 2].inputs(outputs[dim], sizes[dim]) for dim in sizes}

    @property
    def span(self) -> Box:
        """The box of the part with its halo and its zeros."""
        return {window.dim: window.pieces[0] for window in self.windows}

    def own_padding(self) -> list[int] | None:
        """Return the padding by which the own part alone gives this rank's outputs, if any does."""
        if self.dims[0].transposed or 0 in self.shape:
            return None
        padding = [dim.padding for dim in self.dims]
        for window in self.windows:
            dim, (start, stop) = self.dims[window.dim - 2], window.cut.own
            before = start - window.pieces[0][0]
            outputs = (stop - start + 2 * before - dim.reach - 1) // dim.stride + 1
            if before < 0 or start >= stop or outputs != self.shape[window.dim]:
                return None
            padding[window.dim - 2] = before
        return padding

    def crop(self) -> list[int]:
        """Return the ``F.pad`` amounts from a transposed convolution to this rank's outputs."""
        amounts = [0] * (2 * len(self.dims))
        for window in self.windows:
            dim, (first, last) = self.dims[window.dim - 2], window.inside
            low = first * dim.stride - dim.padding
            high = (last - 1) * dim.stride - dim.padding + dim.reach + 1
            start, stop = self.spans[window.dim]
            place = 2 * (len(self.shape) - 1 - window.dim)
            amounts[place : place + 2] = [low - start, stop - high]
        return amounts


class _CutConvolution(torch.autograd.Function):
    """A convolution of this rank's part ``[B, C, ...]`` by a ``ConvPlan``.

    The sum of the gradients of weight and bias travels together with the gradients of the halo.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
        halo, padding = Halo(x, plan.windows), plan.own_padding()
        if padding is None:
            halo.advance(len(plan.windows))
            out = _convolution_of_copy(read(halo.blocks, plan.span), weight, bias, plan)
        else:
            with collectives.computing("conv interior"):
                out = _aten.convolution(x, weight, bias, *plan.arguments(padding))
            for level, box in _edges(plan):
                halo.advance(level + 1)
                with collectives.computing("conv edge"):
                    inputs = read(halo.blocks, plan.inputs(box))
                    part = _aten.convolution(inputs, weight, bias, *plan.arguments())
                narrowed(out, box, plan.spans).copy_(part)
            halo.advance(len(plan.windows))
        ctx.plan = plan
        ctx.save_for_backward(x, weight, *(rows for _, rows in halo.blocks[1:]))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, *received = ctx.saved_tensors
        plan: ConvPlan = ctx.plan
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        own, boxes = own_box(plan.windows), received_boxes(plan.windows)
        grad_bias = grad.sum((0, *range(2, grad.dim()))) if needs_bias else None
        padding, arguments = plan.own_padding(), plan.arguments()
        parts, weights, mask = [], [], (needs_x, needs_weight)
        if padding is None:
            copy = read([(own, x), *zip(boxes, received, strict=True)], plan.span)
            if plan.dims[0].transposed and grad.numel() and copy.numel():
                grad = F.pad(grad, [-amount for amount in plan.crop()])
            if needs_x:
                grad_copy, _ = _gradients(grad, copy, weight, arguments, True, False)
                grad_x, *parts = (read([(plan.span, grad_copy)], box) for box in (own, *boxes))
        for box, rows in zip(boxes, received, strict=True) if padding is not None else ():
            outputs = {
                dim: plan.dims[dim - 2].touched(box[dim], span) for dim, span in plan.spans.items()
            }
            if any(start >= stop for start, stop in outputs.values()):
                parts.append(torch.zeros_like(rows))
                continue
            inputs = plan.inputs(outputs)
            grad_out = narrowed(grad, outputs, plan.spans).contiguous()
            values = read([(box, rows)], inputs)
            grad_rows, grad_weight = _gradients(grad_out, values, weight, arguments, *mask)
            parts.append(read([(inputs, grad_rows)], box) if needs_x else rows)
            weights.append(grad_weight)
        if needs_x:
            finish = return_gradients(list(zip(boxes, parts, strict=True)), plan.windows, x)
        with collectives.computing("conv weight"):
            if padding is None:
                _, grad_weight = _gradients(grad, copy, weight, arguments, False, needs_weight)
            else:
                grad_x, grad_weight = _gradients(grad, x, weight, plan.arguments(padding), *mask)
        for other in weights if needs_weight else ():
            grad_weight.add_(other)
        total = gradient_sum([grad_weight, grad_bias], plan.axes)
        return finish(grad_x) if needs_x else None, *total(), None


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, arguments: Any, needs_x: bool, needs_weight: bool
) -> Any:
    if grad.numel() == 0 or x.numel() == 0 or not (needs_x or needs_weight):
        zeros = zip((x, weight), (needs_x, needs_weight), strict=True)
        return [torch.zeros_like(value) if is_needed else None for value, is_needed in zeros]
    mask = [needs_x, needs_weight, False]
    return _aten.convolution_backward(grad, x, weight, None, *arguments, mask)[:2]


def _convolution_of_copy(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    """Return this rank's outputs from its part with the halo."""
    if 0 in plan.shape or x.numel() == 0:  # no input reaches an output
        out = x.new_zeros(plan.shape)
    elif not plan.dims[0].transposed:
        return _aten.convolution(x, weight, bias, *plan.arguments())
    else:
        out, crop = _aten.convolution(x, weight, None, *plan.arguments()), plan.crop()
        out = F.pad(out, crop) if any(crop) else out
    return out if bias is None else out + bias.view(-1, *[1] * len(plan.dims))


def _edges(plan: ConvPlan) -> list[tuple[int, Box]]:
    """Return disjoint boxes of the outputs that need a halo, each with the last dim it needs."""
    spans, interior = plan.spans, {}
    for window in plan.windows:
        (start, stop), (first, last) = window.cut.own, window.inside
        # Zeros beyond the end of the tensor do not have to arrive.
        low = min(start, window.pieces[0][0]) if first >= start else start
        high = max(stop, window.pieces[0][1]) if last <= stop else stop
        outputs = plan.dims[window.dim - 2].outputs((low, high), spans[window.dim])
        interior[window.dim] = outputs
    edges = []
    names = list(interior)
    for level, dim in enumerate(names):
        (start, stop), (first, last) = interior[dim], spans[dim]
        for edge in ((first, start), (stop, last)):
            box = {name: spans[name] for name in names[:level]}
            box |= {dim: edge} | {name: interior[name] for name in names[level + 1 :]}
            if all(a < b for a, b in box.values()):
                edges.append((level, box))
    return edges


def output_windows(
    partition: Partition, dims: Sequence[ConvDim], extents: Sequence[int]
) -> tuple[tuple[Window, ...], list[Interval], Partition]:
    """Return what a convolution or pooling over the last dims computes, of given extents.

    These are the windows of the inputs along cut dims, this rank's outputs along all of the dims,
    and the partition of the result.
    """
    windows, spans = [], []
    lead = len(partition.shape) - len(dims)
    for dim, (sizes, extent) in enumerate(zip(dims, extents, strict=True), start=lead):
        cut = partition.cuts[dim]
        result = None if cut is None else cut.resized(extent)
        if cut is not None and result is not None:
            needed = [sizes.inputs(span, cut.size) for span in result.spans()]
            windows.append(span_window(dim, cut, needed))
        spans.append((0, extent) if result is None else result.own)
        partition = partition.replaced(dim, extent, result)
    return tuple(windows), spans, partition


def per_dim(value: Any, ndim: int) -> list[Any]:
    """Return an argument of torch as one number for each dim."""
    numbers = [value] if isinstance(value, (int, float)) else list(value)
    return numbers * ndim if len(numbers) == 1 else numbers


def _convolution(op: str, x: Any, weight: Any, bias: Any, dims: list[ConvDim], groups: int) -> Any:
    if not isinstance(x, SpatialTensor):
        return refuse(f"{op} with a weight that is cut and an input that is not")
    if x.dim() == len(dims) + 1:
        return _convolution(op, x.unsqueeze(0), weight, bias, dims, groups).squeeze(0)
    partition: Partition = x._partition
    if partition.is_cut(1):
        return refuse(f"{op} with channels that are cut")
    local = unwrap(x)
    lower = dtypes.autocast_dtype(local.device)
    if lower is not None and local.dtype != torch.float64:
        local, weight = local.to(lower), weight.to(lower)
        bias = bias if bias is None else bias.to(lower)
    extents = [dim.output(size) for dim, size in zip(dims, partition.shape[2:], strict=True)]
    for index, (dim, extent) in enumerate(zip(dims, extents, strict=True), start=2):
        if extent < 1:
            needed = f"at least {dim.reach + 1} with its padding"
            checks.fail(op, f"dim {index}", needed, f"{partition.shape[index]} rows")
    channels = weight.shape[1] * groups if dims[0].transposed else weight.shape[0]
    windows, spans, result = output_windows(partition.replaced(1, channels), dims, extents)
    cut_spans = {window.dim: spans[window.dim - 2] for window in windows}
    plan = ConvPlan(windows, cut_spans, dims, groups, result.local_shape, partition.axes)
    with nullcontext() if lower is None else torch.autocast(local.device.type, enabled=False):
        return wrap(_CutConvolution.apply(local, weight, bias, plan), result)


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
    op, ndim = func.__name__, int(func.__name__[-2])
    strides, dilations = per_dim(stride, ndim), per_dim(dilation, ndim)
    pads = [0] * ndim if isinstance(padding, str) else per_dim(padding, ndim)
    if padding == "same":
        if any(number != 1 for number in strides):
            checks.fail(op, "stride", "1 with padding='same'", stride)
        totals = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = [total // 2 for total in totals]
        # Of an odd number of zeros, one more is behind the input.
        more = [number for total in reversed(totals) for number in (0, total % 2)]
        input = F.pad(input, more) if any(more) else input
    columns = zip(weight.shape[2:], strides, pads, dilations, strict=True)
    return _convolution(op, input, weight, bias, [ConvDim(*column) for column in columns], groups)


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
    op, ndim = func.__name__, int(func.__name__[-2])
    arguments = (stride, padding, dilation, output_padding)
    columns = zip(weight.shape[2:], *(per_dim(a, ndim) for a in arguments), strict=True)
    dims = [ConvDim(k, s, p, d, extra, True) for k, s, p, d, extra in columns]
    if any(dim.extra >= max(dim.stride, dim.dilation) for dim in dims):
        checks.fail(op, "output_padding", "smaller than stride or dilation", output_padding)
    return _convolution(op, input, weight, bias, dims, groups)
