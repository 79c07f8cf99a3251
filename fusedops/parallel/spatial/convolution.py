"""Convolution of a cut tensor: each rank computes the outputs of its part of the result.

The result's cut follows from its extent (``Cut.resized``), and the inputs that a rank needs from
the positions of its outputs, ``[o0 * stride - padding, (o1 - 1) * stride - padding + dilation *
(kernel - 1)]``, for any stride, dilation and padding. A transposed convolution needs the inputs
that reach its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks, dtypes
from fusedops.parallel.spatial.conv_autograd import ConvDim, ConvPlan, CutConvolution
from fusedops.parallel.spatial.halo import Window, window
from fusedops.parallel.spatial.partition import Interval, Partition
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    rule,
    unsupported,
    unwrap,
    wrap,
)


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
    weight, bias = unwrap(weight), unwrap(bias)
    lower = dtypes.autocast_dtype(local.device)
    if lower is not None and local.dtype != torch.float64:
        local, weight = local.to(lower), weight.to(lower)
        bias = bias if bias is None else bias.to(lower)
    channels = weight.shape[1] * groups if dims[0].transposed else weight.shape[0]
    result = partition.replaced(1, channels)
    extents = []
    for dim, (sizes, size) in enumerate(zip(dims, partition.shape[2:], strict=True), start=2):
        extents.append(sizes.output(size))
        if extents[-1] < 1:
            needed = f"at least {sizes.reach + 1} with its padding"
            checks.fail(op, f"dim {dim}", needed, f"{size} rows")
    windows, spans, result = output_windows(result, dims, extents)
    cut_spans = {item.dim: spans[item.dim - 2] for item in windows}
    plan = ConvPlan(tuple(windows), cut_spans, tuple(dims), groups, result.local_shape)
    cast = nullcontext() if lower is None else torch.autocast(local.device.type, enabled=False)
    with cast:
        out = CutConvolution.apply(local, weight, bias, plan, axes)
    return wrap(out, result)


def output_windows(
    partition: Partition, dims: Sequence[ConvDim], extents: Sequence[int]
) -> tuple[list[Window], list[Interval], Partition]:
    """Return what the outputs of a convolution or pooling over the last dims are.

    Args:
        partition: of the input.
        dims: the sizes of the last dims.
        extents: of the result along them.

    Returns:
        The windows of the inputs along cut dims, this rank's outputs along all, and the result.
    """
    windows, spans = [], []
    for dim, (sizes, extent) in enumerate(
        zip(dims, extents, strict=True), start=len(partition.shape) - len(dims)
    ):
        cut = partition.cuts[dim]
        result = None if cut is None else cut.resized(extent)
        if cut is not None and result is not None:
            needed = [sizes.inputs(span, cut.size) for span in result.spans()]
            windows.append(window(dim, cut, needed))
        spans.append((0, extent) if result is None else result.own)
        partition = partition.replaced(dim, extent, result)
    return windows, spans, partition


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
