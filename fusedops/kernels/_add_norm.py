"""add_layer_norm and add_rms_norm in Triton: kernels and launchers for both.

Forward: a program holds its rows in registers, reads input and residual once, writes the sum and
its normalisation once. The mask is drawn from the element's index, never stored. Backward: a fixed
number of programs walk the rows, write the gradients of input and residual, and keep their parts of
the parameter gradients in float32 registers, which a second kernel adds in order: no atomics, the
same bits in every run.

Rows too long for the registers take the kernels of the plain norm (``_norm.py``) and of
``bias_dropout_add`` one after the other: one more pass over the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core import philox
from fusedops._core.capability import compute_capability
from fusedops.kernels import _launch, _norm, bias_dropout_add
from fusedops.kernels._device import dropout
from fusedops.kernels._norm import MAX_FUSED, NormVariant
from fusedops.kernels._norm_rows import (
    affine,
    load_row,
    normalized,
    renormalized,
    row_gradient,
    scale_of,
    statistics,
)

# Columns that a program of the forward holds in registers. At 32768 it spills (sm_90).
_MAX_FORWARD = 16384


@triton.jit(do_not_specialize=["limit"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    num_cols,
    eps,
    weight_offset,
    limit,
    scale,
    CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    row_mask = row < num_rows
    col_mask = col < num_cols
    mask = row_mask[:, None] & col_mask[None, :]
    start = row[:, None].to(tl.int64) * num_cols
    offset = start + col[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = dropout(x, start, seed_ptr, limit, scale, DROPOUT)
    x = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32) + x
    summed = x.to(summed_ptr.dtype.element_ty)
    tl.store(summed_ptr + offset, summed, mask=mask)
    x = tl.where(mask, summed.to(tl.float32), 0.0)
    x, mean, rstd = statistics(x, mask, num_cols, eps, CENTRED)
    y = normalized(x, rstd[:, None], summed_ptr.dtype.element_ty, ROUND_FIRST)
    y = affine(y, weight_ptr, bias_ptr, weight_offset, col, col_mask, HAS_WEIGHT, HAS_BIAS)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
    if CENTRED:
        tl.store(mean_ptr + row, mean, mask=row_mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)


@triton.jit(do_not_specialize=["limit"])
def _backward_kernel(
    dy_ptr,
    dsummed_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    num_cols,
    weight_offset,
    limit,
    scale,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DSUMMED: tl.constexpr,
    WANTS_INPUT: tl.constexpr,
    WANTS_RESIDUAL: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
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
        start = tl.cast(row, tl.int64) * num_cols
        offset = start + col
        if AHEAD:
            dy, x = next_dy.to(tl.float32), next_x.to(tl.float32)
            if HAS_DSUMMED and (WANTS_INPUT or WANTS_RESIDUAL):
                dsummed = tl.load(dsummed_ptr + offset, mask=mask, other=0.0)
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
        if WANTS_INPUT or WANTS_RESIDUAL:
            total = row_gradient(dy * weight, x, rstd, num_cols, CENTRED)
            if HAS_DSUMMED:
                if not AHEAD:
                    dsummed = tl.load(dsummed_ptr + offset, mask=mask, other=0.0)
                total += dsummed.to(tl.float32)
            if WANTS_INPUT:
                dx = dropout(total, start, seed_ptr, limit, scale, DROPOUT)
                tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if WANTS_RESIDUAL:
                tl.store(
                    dresidual_ptr + offset, total.to(dresidual_ptr.dtype.element_ty), mask=mask
                )
    part = tl.cast(program, tl.int64) * num_cols + col
    if WANTS_WEIGHT:
        tl.store(dweight_ptr + part, dweight, mask=mask)
    if WANTS_BIAS:
        tl.store(dbias_ptr + part, dbias, mask=mask)


def forward(
    kind: NormVariant,
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; returns normed, summed, mean and rstd (the mean is as ``_norm``'s)."""
    x, r = input.contiguous(), residual.contiguous()
    leading = r.shape[: r.dim() - len(normalized_shape)]
    num_rows = leading.numel()
    num_cols = r.numel() // num_rows if r.numel() else 0
    if num_cols > _MAX_FORWARD:
        summed = bias_dropout_add.forward(x, None, r, seed, dropout_p, input_dtype)
        normed, mean, rstd = _norm.forward(kind, summed, normalized_shape, weight, bias, eps)
        return normed, summed, mean, rstd
    summed = torch.empty_like(r)
    normed = torch.empty_like(r, dtype=kind.output_dtype(r.dtype, weight))
    rstd = r.new_empty(leading, dtype=torch.float32)
    mean = torch.empty_like(rstd) if kind.centred else rstd
    if r.numel() == 0:
        return normed, summed, mean, rstd
    block_n = triton.next_power_of_2(num_cols)
    block_m = max(1, min(16, 1024 // block_n))
    tensors = (x, r, _launch.dense(weight, r), _launch.dense(bias, r), _launch.dense(seed, r))
    numbers = (num_rows, num_cols, eps, kind.weight_offset)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    flags |= {"CENTRED": kind.centred, "ROUND_FIRST": kind.round_first}
    dropout = _launch.dropout_arguments(dropout_p, num_cols, seed)
    launch = {"BLOCK_M": block_m, "BLOCK_N": block_n} | _launch.row_options(block_m * block_n)
    with _launch.device_of(r):
        _forward_kernel[(triton.cdiv(num_rows, block_m),)](
            *tensors, normed, summed, mean, rstd, *numbers, **dropout, **flags, **launch
        )
    return normed, summed, mean, rstd


def backward(
    kind: NormVariant,
    grad_normed: torch.Tensor | None,
    grad_summed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    normalized_shape: Sequence[int],
    dropout_p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; returns the requested gradients of input, residual, weight and bias."""
    x = summed.contiguous()
    num_rows = rstd.numel()
    num_cols = x.numel() // num_rows if x.numel() else 0
    # Otherwise the gradient of input is that of residual.
    same = output_mask[1] and philox.threshold(dropout_p) == 0 and input_dtype == x.dtype
    has_dy = grad_normed is not None
    wants_input, wants_residual = output_mask[0] and not same, output_mask[1]
    wants_weight, wants_bias = output_mask[2] and has_dy, output_mask[3] and has_dy
    dtype = x.dtype if weight is None else weight.dtype
    if x.numel() == 0:
        return (
            torch.empty_like(x, dtype=input_dtype) if wants_input else None,
            torch.empty_like(x) if wants_residual else None,
            x.new_zeros(normalized_shape, dtype=dtype) if wants_weight else None,
            x.new_zeros(normalized_shape, dtype=dtype) if wants_bias else None,
        )
    if grad_normed is None or num_cols > MAX_FUSED:
        dweight = dbias = None
        total = grad_summed
        if grad_normed is not None:
            mask = (wants_input or wants_residual, wants_weight, wants_bias)
            total, dweight, dbias = _norm.backward(
                kind, grad_normed, x, weight, mean, rstd, normalized_shape, mask
            )
            if total is not None and grad_summed is not None:
                total = total + grad_summed
        dx = None
        if wants_input:
            assert total is not None
            only_input = (True, False, False)
            dx = bias_dropout_add.backward(total, None, seed, dropout_p, input_dtype, only_input)[0]
            dx = total.clone(memory_format=torch.contiguous_format) if dx is None else dx
        if not wants_residual:
            total = None
        elif grad_normed is None:
            assert total is not None
            total = total.clone(memory_format=torch.contiguous_format)
        return dx, total, dweight, dbias
    dx = torch.empty_like(x, dtype=input_dtype) if wants_input else None
    dresidual = torch.empty_like(x) if wants_residual else None
    block_n = triton.next_power_of_2(num_cols)
    options = _backward_options(block_n, newest=(compute_capability(x.device) or (0,))[0] == 12)
    programs = _launch.row_programs(x.device, num_rows, options["num_warps"])
    parts = [
        x.new_empty((programs, num_cols), dtype=torch.float32) if needed else None
        for needed in (wants_weight, wants_bias)
    ]
    grads = (grad_normed.contiguous(), _launch.dense(grad_summed, x))
    statistics = (mean.contiguous(), rstd.contiguous())
    tensors = (*grads, x, _launch.dense(weight, x), *statistics, _launch.dense(seed, x))
    targets = (x if tensor is None else tensor for tensor in (dx, dresidual, *parts))
    dropout = _launch.dropout_arguments(dropout_p, num_cols, seed)
    flags = {"CENTRED": kind.centred, "HAS_WEIGHT": weight is not None}
    flags["HAS_DSUMMED"] = grad_summed is not None
    names = ("WANTS_INPUT", "WANTS_RESIDUAL", "WANTS_WEIGHT", "WANTS_BIAS")
    flags |= zip(names, (wants_input, wants_residual, wants_weight, wants_bias), strict=True)
    launch = {"BLOCK_N": block_n} | options
    with _launch.device_of(x):
        _backward_kernel[(programs,)](
            *tensors, *targets, num_rows, num_cols, kind.weight_offset, **dropout, **flags, **launch
        )
        dweight, dbias = (_launch.sum_rows(part, dtype, normalized_shape) for part in parts)
    return dx, dresidual, dweight, dbias


def _backward_options(block_n: int, *, newest: bool) -> dict[str, Any]:
    """Return launch options; 16 warps spill rows of 8192 on sm_120 (``newest``), Triton 3.6."""
    options = _launch.row_options(2 * block_n)
    return options | ({"num_warps": 32} if newest and block_n > 4096 else {})
