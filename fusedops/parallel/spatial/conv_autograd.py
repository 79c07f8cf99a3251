"""Forward and backward of a convolution whose input is cut.

Where symmetric padding gives a rank its outputs, it convolves its own part with zeros in place of
the halo while the halo travels, and computes the outputs at the edges again when it is there. The
part is never copied. In the backward, an input is the sum of the own part and of what was received:
the gradients of the received rows are computed first, and travel while those of the own part are
computed. Otherwise (even kernels, parts without rows, transposed convolutions) the part is copied
with its halo. Saved are the part itself and the received rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial.halo import (
    Box,
    Halo,
    HaloGradient,
    Window,
    narrowed,
    read,
    split_gradient,
)
from fusedops.parallel.spatial.partition import Axis, Interval, overlap
from fusedops.parallel.spatial.tensor import ReplicatedGradientSum

_aten: Any = torch.ops.aten
# The gradients of other ranks' rows, which have started to travel; that of the own part, without
# those that arrive; and that of the weight. ``None``: it is not needed.
Gradients = tuple[HaloGradient | None, Tensor | None, Tensor | None]


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

    def touched(self, span: Interval, within: Interval) -> Interval:
        """Return those of some outputs that read an input of a span."""
        first = -(-(span[0] + self.low - self.reach) // self.stride)
        last = (span[1] - 1 + self.low) // self.stride
        return overlap((first, last + 1), within) or (within[0], within[0])

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

    def arguments(self, padding: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return the arguments of ``aten::convolution`` behind the bias.

        Args:
            padding: by spatial dim; by default that of a part with its halo and its zeros.
        """
        cut = {window.dim - 2 for window in self.windows}
        if padding is None:
            padding = [0 if i in cut else dim.low for i, dim in enumerate(self.dims)]
        extra = [0 if i in cut else dim.extra for i, dim in enumerate(self.dims)]
        strides = [dim.stride for dim in self.dims]
        dilations = [dim.dilation for dim in self.dims]
        return strides, list(padding), dilations, self.transposed, extra, self.groups

    def own_padding(self) -> list[int] | None:
        """Return the padding by which the own part alone has the shape of this rank's result.

        ``None`` where no symmetric padding does that.
        """
        if self.transposed or 0 in self.shape:
            return None
        padding = [dim.low for dim in self.dims]
        for window in self.windows:
            dim, (start, stop) = self.dims[window.dim - 2], window.cut.own
            before, padded = start - window.span[0], 2 * start - 2 * window.span[0] + stop - start
            outputs = (padded - dim.reach - 1) // dim.stride + 1
            if before < 0 or start >= stop or outputs != self.shape[window.dim]:
                return None
            padding[window.dim - 2] = before
        return padding

    def inputs(self, outputs: Box) -> Box:
        """Return the inputs of a box of outputs along the cut dims, with padding."""
        return {
            window.dim: self.dims[window.dim - 2].inputs(outputs[window.dim], window.cut.size)
            for window in self.windows
        }

    def touched(self, inputs: Box) -> Box:
        """Return this rank's outputs that read an input of a box."""
        return {
            dim: self.dims[dim - 2].touched(inputs[dim], span) for dim, span in self.spans.items()
        }

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


class CutConvolution(torch.autograd.Function):
    """A convolution of this rank's part ``[B, C, ...]`` by a ``ConvPlan``.

    Weight and bias are replicated over ``axes``. The sum of their gradients travels together with
    the gradients of the halo.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: ConvPlan,
        axes: tuple[Axis, ...],
    ) -> Tensor:
        """Return this rank's outputs."""
        halo = Halo(x, plan.windows)
        out = _forward(halo, weight, bias, plan)
        ctx.plan, ctx.axes = plan, axes
        ctx.save_for_backward(x, weight, *halo.received)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of the part, the weight and the bias."""
        x, weight, *received = ctx.saved_tensors
        plan: ConvPlan = ctx.plan
        halo = Halo(x, plan.windows, received=received)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        padding = plan.own_padding()
        function = _extended_gradients if padding is None else _own_gradients
        back, grad_x, grad_weight = function(grad, halo, weight, plan, needs_x, needs_weight)
        grad_bias = grad.sum((0, *range(2, grad.dim()))) if needs_bias else None
        total = ReplicatedGradientSum([grad_weight, grad_bias], ctx.axes)
        if back is not None and grad_x is not None:
            grad_x = back.finish(grad_x)
        return grad_x, *total.wait(), None, None


def _forward(halo: Halo, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    padding = plan.own_padding()
    if padding is None:
        halo.exchange()
        if plan.transposed:
            return _transposed(halo, weight, bias, plan)
        if 0 in plan.shape:
            return halo.x.new_empty(plan.shape)
        return _aten.convolution(halo.everything(), weight, bias, *plan.arguments())
    halo.start()
    with collectives.computing("conv interior"):
        out: Tensor = _aten.convolution(halo.x, weight, bias, *plan.arguments(padding))
    for level, box in _edges(plan):
        halo.advance(level + 1)
        with collectives.computing("conv edge"):
            inputs = halo.read(plan.inputs(box))
            part = _aten.convolution(inputs, weight, bias, *plan.arguments())
        narrowed(out, box, plan.spans).copy_(part)
    halo.advance(len(plan.windows))
    return out


def _edges(plan: ConvPlan) -> list[tuple[int, Box]]:
    """Return disjoint boxes of the outputs that need a halo, each with the last dim it needs."""
    spans, interior = plan.spans, {}
    for window in plan.windows:
        (start, stop), (first, last) = window.cut.own, window.inside
        # Zeros beyond the end of the tensor do not have to arrive.
        low = min(start, window.span[0]) if first >= start else start
        high = max(stop, window.span[1]) if last <= stop else stop
        outputs = plan.dims[window.dim - 2].outputs((low, high), spans[window.dim])
        interior[window.dim] = outputs
    edges = []
    names = list(interior)
    for level, dim in enumerate(names):
        (start, stop), (first, last) = interior[dim], spans[dim]
        for edge in ((first, start), (stop, last)):
            if edge[0] < edge[1]:
                box = {name: spans[name] for name in names[:level]}
                box |= {dim: edge} | {name: interior[name] for name in names[level + 1 :]}
                if all(a < b for a, b in box.values()):
                    edges.append((level, box))
    return edges


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


def _own_gradients(
    grad: Tensor, halo: Halo, weight: Tensor, plan: ConvPlan, needs_x: bool, needs_weight: bool
) -> Gradients:
    """Return what ``Gradients`` says, from the part and the received rows one by one."""
    mask = [needs_x, needs_weight, False]
    parts: list[Tensor] = []
    weights: list[Tensor] = []
    for box, rows in halo.blocks[1:]:
        outputs = plan.touched(box)
        if any(start >= stop for start, stop in outputs.values()):
            parts.append(torch.zeros_like(rows))
            continue
        inputs = plan.inputs(outputs)
        grad_rows, grad_weight, _ = _aten.convolution_backward(
            narrowed(grad, outputs, plan.spans).contiguous(),
            *(read([(box, rows)], inputs), weight, None, *plan.arguments(), mask),
        )
        parts.append(read([(inputs, grad_rows)], box) if needs_x else rows)
        weights.append(grad_weight)
    back = HaloGradient(halo.x, parts, plan.windows) if needs_x else None
    if back is not None:
        back.start()
    with collectives.computing("conv weight"):
        grad_x, grad_weight, _ = _aten.convolution_backward(
            grad, halo.x, weight, None, *plan.arguments(plan.own_padding()), mask
        )
    for other in weights if needs_weight else ():
        grad_weight.add_(other)
    return back, grad_x, grad_weight


def _extended_gradients(
    grad: Tensor, halo: Halo, weight: Tensor, plan: ConvPlan, needs_x: bool, needs_weight: bool
) -> Gradients:
    """Return what ``Gradients`` says, from a copy of the part with its halo."""
    extended = halo.everything()
    empty = grad.numel() == 0 or extended.numel() == 0
    if plan.transposed and not empty:
        grad = F.pad(grad, [-amount for amount in plan.crop()])

    def gradient(*mask: bool) -> Any:
        return _aten.convolution_backward(
            grad, extended, weight, None, *plan.arguments(), list(mask)
        )

    back = own = grad_weight = None
    if needs_x:
        grad_extended = torch.zeros_like(extended) if empty else gradient(True, False, False)[0]
        own, parts = split_gradient(grad_extended, plan.windows)
        back = HaloGradient(own, parts, plan.windows)
        back.start()
    if needs_weight:
        with collectives.computing("conv weight"):
            grad_weight = torch.zeros_like(weight) if empty else gradient(False, True, False)[1]
    return back, own, grad_weight
