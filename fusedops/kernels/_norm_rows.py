"""What the norms' Triton kernels do to rows in registers: statistics, scaling, gradient.

Rows are float32. ``CENTRED`` tells layer norm from RMS norm, whose mean is zero and is not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def statistics(x, mask, num_cols, eps, CENTRED: tl.constexpr):
    """Return rows ``x [M, N]`` less their mean, the mean and the inverse deviation, each ``[M]``.

    ``x`` is zero where ``mask`` is not set; so is the result.
    """
    mean = tl.zeros((x.shape[0],), tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / num_cols
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / num_cols + eps)
    return x, mean, rstd


@triton.jit
def normalized(x, rstd, dtype, ROUND_FIRST: tl.constexpr):
    """Return rows ``x`` times ``rstd``, rounded to ``dtype`` where that comes first."""
    y = x * rstd
    if ROUND_FIRST:
        y = y.to(dtype).to(tl.float32)
    return y


@triton.jit
def scale_of(weight_ptr, weight_offset, col, mask, HAS_WEIGHT: tl.constexpr):
    """Return the factor of the columns: the weight and its offset, or 1."""
    if HAS_WEIGHT:
        scale = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32) + weight_offset
    else:
        scale = tl.full(col.shape, 1.0, tl.float32)
    return scale


@triton.jit
def affine(
    y,
    weight_ptr,
    bias_ptr,
    weight_offset,
    col,
    mask,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return rows ``y [..., N]`` scaled and shifted by the parameters of the columns."""
    if HAS_WEIGHT:
        y *= scale_of(weight_ptr, weight_offset, col, mask, HAS_WEIGHT)
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def renormalized(x, mean_ptr, rstd_ptr, mask, CENTRED: tl.constexpr):
    """Return the row ``x [N]`` normalised by its saved statistics, zero off ``mask``, and rstd."""
    rstd = tl.load(rstd_ptr)
    if CENTRED:
        x = tl.where(mask, x - tl.load(mean_ptr), 0.0)
    return x * rstd, rstd


@triton.jit
def row_gradient(scaled, x, rstd, num_cols, CENTRED: tl.constexpr):
    """Return the gradient of a row from that of its normalisation ``x``; both zero off the row."""
    along = tl.sum(scaled * x, axis=0) / num_cols
    if CENTRED:
        scaled -= tl.sum(scaled, axis=0) / num_cols
    return (scaled - x * along) * rstd


@triton.jit
def load_row(ptr, row, num_rows, num_cols, col, mask):
    """Load row ``row [N]`` as it lies; zeros past the last one, so that a loop may run ahead."""
    offset = tl.cast(row, tl.int64) * num_cols + col
    return tl.load(ptr + offset, mask=mask & (row < num_rows), other=0.0)
