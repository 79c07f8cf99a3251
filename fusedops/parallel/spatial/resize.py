"""Interpolation: every output is a weighted sum of few rows per dim, at global positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops._core import checks
from fusedops._core.device_tensors import to_device
from fusedops.parallel.spatial.halo import fetch_rows
from fusedops.parallel.spatial.partition import single
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import rule, unwrap, wrap

LINEAR = ("linear", "bilinear", "trilinear")


def weighted(op: str, x: Any, dim: int, sources: Any, weights: Any | None) -> Any:
    """Return weighted sums of the rows of one dim.

    Args:
        op: for messages.
        x: a SpatialTensor.
        dim: of it, cut or not.
        sources: ``[outputs, taps]``, rows of the complete tensor, with bounded distances.
        weights: the same shape; ``None``: the rows of one tap are copied.
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
    shape = input.shape[2:]
    scales: list[float | None] = [None] * ndim
    if size is not None:
        counts = [size] * ndim if isinstance(size, int) else [int(number) for number in size]
    else:
        one = isinstance(scale_factor, (int, float))
        factors = [scale_factor] * ndim if one else list(scale_factor)
        counts = [math.floor(n * f) for n, f in zip(shape, factors, strict=True)]
        if not recompute_scale_factor:
            scales = [float(factor) for factor in factors]
    if mode == "area":
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
        return pool[ndim - 1](input, counts)
    if mode not in (*LINEAR, "nearest", "nearest-exact"):
        return refuse(f"interpolate with mode {mode!r}")
    x = input
    for index, (count, scale) in enumerate(zip(counts, scales, strict=True)):
        if count < 1:
            checks.fail("interpolate", "the output size", "at least 1", count)
        if count == shape[index] and scale in (None, 1.0):
            continue
        taps, weights = _positions(
            shape[index], count, scale, mode, bool(align_corners), input.dtype
        )
        x = weighted("interpolate", x, 2 + index, taps, weights)
    return x
