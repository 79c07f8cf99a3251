"""bias_dropout_add in Triton: forward, backward, launchers.

One pass: a program adds a block of rows. The mask is drawn from the element's index, never stored.
The backward runs a fixed number of programs per block of columns; each walks its rows and keeps its
part of the bias gradient in float32 registers; a second kernel adds the parts in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core import philox
from fusedops.kernels import _launch
from fusedops.kernels._device import dropout

# Elements of a program, four for each Philox counter.
_TILE = {"BLOCK_M": 4, "BLOCK_N": 512}
_LAUNCH = _TILE | _launch.FOUR_WARPS


@triton.jit(do_not_specialize=["limit"])
def _forward_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    seed_ptr,
    num_rows,
    num_cols,
    limit,
    scale,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    start = row[:, None] * num_cols + tl.program_id(1) * BLOCK_N
    offset = row[:, None] * num_cols + col[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + col, mask=col < num_cols, other=0.0).to(tl.float32)[None, :]
    x = dropout(x, start, seed_ptr, limit, scale, DROPOUT)
    y = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32) + x
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["limit"])
def _backward_kernel(
    dy_ptr,
    dx_ptr,
    dbias_ptr,
    seed_ptr,
    num_rows,
    num_cols,
    limit,
    scale,
    WANTS_INPUT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(program * BLOCK_M, num_rows, tl.num_programs(0) * BLOCK_M):
        row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
        start = row[:, None] * num_cols + tl.program_id(1) * BLOCK_N
        offset = row[:, None] * num_cols + col[None, :]
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dx = dropout(dy, start, seed_ptr, limit, scale, DROPOUT)
        if WANTS_INPUT:
            tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANTS_BIAS:
            dbias += dx
    if WANTS_BIAS:
        part = tl.cast(program, tl.int64) * num_cols + col
        tl.store(dbias_ptr + part, tl.sum(dbias, axis=0), mask=col < num_cols)


def forward(*args: Any) -> torch.Tensor:
    input, bias, residual, seed, p, _ = args
    x, r = input.contiguous(), residual.contiguous()
    output = torch.empty_like(r)
    if r.numel() == 0:
        return output
    num_rows, num_cols = _rows(r)
    tensors = (x, _launch.dense(bias, r), r, output, _launch.dense(seed, r))
    dropout = _launch.dropout_arguments(p, num_cols, seed)
    with _launch.device_of(r):
        _forward_kernel[_grid(num_rows, num_cols)](
            *tensors, num_rows, num_cols, **dropout, HAS_BIAS=bias is not None, **_LAUNCH
        )
    return output


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, bias, seed, p, input_dtype, output_mask = args
    dy = grad_output.contiguous()
    # Otherwise the gradient of input is grad_output itself.
    differs = philox.threshold(p) > 0 or input_dtype != dy.dtype
    wants_input, wants_bias = output_mask[0] and differs, output_mask[1] and bias is not None
    dx = torch.empty_like(dy, dtype=input_dtype) if wants_input else None
    if dy.numel() == 0 or not (wants_input or wants_bias):
        return dx, torch.zeros_like(bias) if wants_bias else None, None
    num_rows, num_cols = _rows(dy)
    programs, blocks = _grid(num_rows, num_cols)
    if wants_bias:
        # About eight programs a multiprocessor keep enough loads in flight, and few parts to add.
        programs = min(programs, triton.cdiv(4 * _launch.num_programs(dy.device), blocks))
    parts = dy.new_empty((programs if wants_bias else 1, num_cols), dtype=torch.float32)
    tensors = (dy, dy if dx is None else dx, parts, _launch.dense(seed, dy))
    dropout = _launch.dropout_arguments(p, num_cols, seed)
    wants = {"WANTS_INPUT": wants_input, "WANTS_BIAS": wants_bias}
    with _launch.device_of(dy):
        _backward_kernel[(programs, blocks)](
            *tensors, num_rows, num_cols, **dropout, **wants, **_LAUNCH
        )
        dbias = _launch.sum_rows(parts, bias.dtype, bias.shape) if wants_bias else None
    return dx, dbias, None


def _rows(tensor: torch.Tensor) -> tuple[int, int]:
    num_cols = tensor.shape[-1] if tensor.dim() else 1
    return tensor.numel() // num_cols, num_cols


def _grid(num_rows: int, num_cols: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, _TILE["BLOCK_M"]), triton.cdiv(num_cols, _TILE["BLOCK_N"])
