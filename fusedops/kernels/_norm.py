"""layer_norm and rms_norm in Triton: kernels and launchers for both.

A row of up to ``MAX_FUSED`` columns stays in registers: the forward reads the input once and
writes the output once. Longer rows are walked in blocks (statistics by a second pass over data that
the L2 cache still holds) instead of spilling registers.

The backward runs a fixed number of programs per device. Each walks its rows, keeps its part of the
weight and bias gradients in float32 registers and writes it once; a second kernel adds the parts in
order. No atomics: the same bits in every run.

``CENTRED`` tells layer norm from RMS norm, which has no mean: its pointer is then not read. What
happens to a row in registers is in ``_norm_rows.py``, for add_layer_norm and add_rms_norm too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._norm_rows import (
    affine,
    load_row,
    normalized,
    renormalized,
    row_gradient,
    scale_of,
    statistics,
)

# Columns of a row that fit in registers with the two float32 accumulators of the backward.
MAX_FUSED = 8192
_LONG_BLOCK = 4096


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    num_cols,
    eps,
    weight_offset,
    CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    row_mask = row < num_rows
    col_mask = col < num_cols
    mask = row_mask[:, None] & col_mask[None, :]
    offset = row[:, None].to(tl.int64) * num_cols + col[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x, mean, rstd = statistics(x, mask, num_cols, eps, CENTRED)
    y = normalized(x, rstd[:, None], x_ptr.dtype.element_ty, ROUND_FIRST)
    y = affine(y, weight_ptr, bias_ptr, weight_offset, col, col_mask, HAS_WEIGHT, HAS_BIAS)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
    if CENTRED:
        tl.store(mean_ptr + row, mean, mask=row_mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)


@triton.jit
def _forward_long_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    num_cols,
    eps,
    weight_offset,
    CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * num_cols
    mean = 0.0
    if CENTRED:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for first in range(0, num_cols, BLOCK_N):
            col = first + tl.arange(0, BLOCK_N)
            total += tl.load(x_ptr + start + col, mask=col < num_cols, other=0.0).to(tl.float32)
        mean = tl.sum(total, axis=0) / num_cols
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + start + col, mask=col < num_cols, other=0.0).to(tl.float32)
        centred = tl.where(col < num_cols, x - mean, 0.0)
        squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / num_cols + eps)
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        mask = col < num_cols
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32) - mean
        y = normalized(x, rstd, x_ptr.dtype.element_ty, ROUND_FIRST)
        y = affine(y, weight_ptr, bias_ptr, weight_offset, col, mask, HAS_WEIGHT, HAS_BIAS)
        tl.store(y_ptr + start + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    num_cols,
    weight_offset,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANTS_INPUT: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Rows program, program + programs, ...: neighbouring programs read neighbouring rows.
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    mask = col < num_cols
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    weight = scale_of(weight_ptr, weight_offset, col, mask, HAS_WEIGHT)
    # The next row is under way while this one is added up; longer ones would cost the registers
    # of a second program.
    AHEAD: tl.constexpr = BLOCK_N <= 1024
    if AHEAD:
        next_dy = load_row(dy_ptr, program, num_rows, num_cols, col, mask)
        next_x = load_row(x_ptr, program, num_rows, num_cols, col, mask)
    for row in range(program, num_rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * num_cols + col
        if AHEAD:
            dy, x = next_dy.to(tl.float32), next_x.to(tl.float32)
            next_dy = load_row(dy_ptr, row + tl.num_programs(0), num_rows, num_cols, col, mask)
            next_x = load_row(x_ptr, row + tl.num_programs(0), num_rows, num_cols, col, mask)
        else:
            dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        x, rstd = renormalized(x, mean_ptr + row, rstd_ptr + row, mask, CENTRED)
        if WANTS_WEIGHT:
            dweight += dy * x
        if WANTS_BIAS:
            dbias += dy
        if WANTS_INPUT:
            dx = row_gradient(dy * weight, x, rstd, num_cols, CENTRED)
            tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    part = tl.cast(program, tl.int64) * num_cols + col
    if WANTS_WEIGHT:
        tl.store(dweight_ptr + part, dweight, mask=mask)
    if WANTS_BIAS:
        tl.store(dbias_ptr + part, dbias, mask=mask)


@triton.jit
def _backward_input_long_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    num_cols,
    weight_offset,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * num_cols
    along = tl.zeros((BLOCK_N,), tl.float32)
    across = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        mask = col < num_cols
        scaled = tl.load(dy_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        scaled *= scale_of(weight_ptr, weight_offset, col, mask, HAS_WEIGHT)
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        x, _ = renormalized(x, mean_ptr + row, rstd_ptr + row, mask, CENTRED)
        along += scaled * x
        across += scaled
    mean_along = tl.sum(along, axis=0) / num_cols
    mean_across = 0.0
    if CENTRED:
        mean_across = tl.sum(across, axis=0) / num_cols
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        mask = col < num_cols
        scaled = tl.load(dy_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        scaled *= scale_of(weight_ptr, weight_offset, col, mask, HAS_WEIGHT)
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        x, rstd = renormalized(x, mean_ptr + row, rstd_ptr + row, mask, CENTRED)
        dx = (scaled - mean_across - x * mean_along) * rstd
        tl.store(dx_ptr + start + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_parameters_long_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    num_cols,
    CENTRED: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = col < num_cols
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for row in range(program, num_rows, tl.num_programs(1)):
        offset = tl.cast(row, tl.int64) * num_cols + col
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if WANTS_WEIGHT:
            x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            x, _ = renormalized(x, mean_ptr + row, rstd_ptr + row, mask, CENTRED)
            dweight += dy * x
        dbias += dy
    part = tl.cast(program, tl.int64) * num_cols + col
    if WANTS_WEIGHT:
        tl.store(dweight_ptr + part, dweight, mask=mask)
    if WANTS_BIAS:
        tl.store(dbias_ptr + part, dbias, mask=mask)


@dataclass(frozen=True)
class NormVariant:
    """How a norm differs from its neighbours."""

    centred: bool
    weight_offset: float = 0.0
    round_first: bool = False

    def output_dtype(self, dtype: torch.dtype, weight: torch.Tensor | None) -> torch.dtype:
        """Return the dtype of the norm of ``dtype``: that of the product when rounded before it."""
        if not self.round_first or weight is None:
            return dtype
        return torch.promote_types(dtype, weight.dtype)


LAYER_NORM = NormVariant(centred=True)


def rms_kind(weight_offset: float, rounding: str) -> NormVariant:
    """Return the kind of an RMS norm."""
    return NormVariant(centred=False, weight_offset=weight_offset, round_first=rounding == "hf")


def forward(
    kind: NormVariant,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; returns output, mean and rstd (without ``centred`` the mean is rstd)."""
    x = input.contiguous()
    leading = x.shape[: x.dim() - len(normalized_shape)]
    output = torch.empty_like(x, dtype=kind.output_dtype(x.dtype, weight))
    rstd = x.new_empty(leading, dtype=torch.float32)
    mean = torch.empty_like(rstd) if kind.centred else rstd
    num_rows = rstd.numel()
    if x.numel() == 0:
        return output, mean, rstd
    num_cols = x.numel() // num_rows
    tensors = (x, _launch.dense(weight, x), _launch.dense(bias, x), output, mean, rstd)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    flags |= {"CENTRED": kind.centred, "ROUND_FIRST": kind.round_first}
    sizes: tuple[int, ...]
    if num_cols > 2 * MAX_FUSED:
        kernel, programs, sizes = _forward_long_kernel, num_rows, (num_cols,)
        blocks = {"BLOCK_N": _LONG_BLOCK}
    else:
        block_n = triton.next_power_of_2(num_cols)
        blocks = {"BLOCK_M": max(1, min(16, 1024 // block_n)), "BLOCK_N": block_n}
        programs, sizes = triton.cdiv(num_rows, blocks["BLOCK_M"]), (num_rows, num_cols)
        kernel = _forward_kernel
    options = _launch.row_options(math.prod(blocks.values()))
    with _launch.device_of(x):
        kernel[(programs,)](*tensors, *sizes, eps, kind.weight_offset, **flags, **blocks, **options)
    return output, mean, rstd


def backward(
    kind: NormVariant,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; returns the requested gradients of input, weight and bias."""
    x = input.contiguous()
    dy = grad_output.contiguous()
    num_rows = rstd.numel()
    dx = torch.empty_like(x) if output_mask[0] else None
    dtype = x.dtype if weight is None else weight.dtype
    if x.numel() == 0:
        dweight, dbias = (
            x.new_zeros(normalized_shape, dtype=dtype) if flag else None for flag in output_mask[1:]
        )
        return dx, dweight, dbias
    num_cols = x.numel() // num_rows
    block_n = triton.next_power_of_2(min(num_cols, MAX_FUSED))
    options = _launch.row_options(2 * block_n)
    programs = min(num_rows, _launch.num_programs(x.device))
    if num_cols <= MAX_FUSED:
        programs = _launch.row_programs(x.device, num_rows, options["num_warps"])
    parts = [
        x.new_empty((programs, num_cols), dtype=torch.float32) if needed else None
        for needed in output_mask[1:]
    ]
    statistics = (mean.contiguous(), rstd.contiguous())
    data = (dy, x, _launch.dense(weight, x), *statistics)
    targets = [x if part is None else part for part in (dx, *parts)]
    flags = {"CENTRED": kind.centred, "HAS_WEIGHT": weight is not None}
    wants = dict(zip(("WANTS_INPUT", "WANTS_WEIGHT", "WANTS_BIAS"), output_mask, strict=True))
    offset = kind.weight_offset
    with _launch.device_of(x):
        if num_cols <= MAX_FUSED:
            launch = {"BLOCK_N": block_n} | options
            _backward_kernel[(programs,)](
                *data, *targets, num_rows, num_cols, offset, **flags, **wants, **launch
            )
        else:
            if wants.pop("WANTS_INPUT"):
                launch = {"BLOCK_N": _LONG_BLOCK} | _launch.row_options(_LONG_BLOCK)
                _backward_input_long_kernel[(num_rows,)](
                    *data, targets[0], num_cols, offset, **flags, **launch
                )
            if any(wants.values()):
                sums = (dy, x, *statistics, *targets[1:], num_rows, num_cols)
                launch = {"BLOCK_N": 1024} | _launch.row_options(1024)
                _backward_parameters_long_kernel[(triton.cdiv(num_cols, 1024), programs)](
                    *sums, CENTRED=kind.centred, **wants, **launch
                )
        dweight, dbias = (_launch.sum_rows(part, dtype, normalized_shape) for part in parts)
    return dx, dweight, dbias
