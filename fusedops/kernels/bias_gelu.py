"""bias_gelu in Triton: forward, backward, launchers.

Tiles of rows and columns, the bias loaded once a tile. The backward writes dx in the same pass in
which each program adds the part of the bias gradient that its rows give, in float32 registers; a
second kernel adds the parts in order. No atomics: the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core.activation import GELU_VARIANTS
from fusedops.kernels import _launch
from fusedops.kernels._device import act_slope, act_value

_TILE = 2048
_MAX_COLS = 512


@triton.jit
def _forward_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_cols,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    col_tiles = tl.cdiv(num_cols, BLOCK_N)
    row = tl.program_id(0) // col_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % col_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    offset = row[:, None].to(tl.int64) * num_cols + col[None, :]
    bias = tl.load(bias_ptr + col, mask=col < num_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    y = act_value(x, ACTIVATION, y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    dbias_ptr,
    num_rows,
    num_cols,
    ACTIVATION: tl.constexpr,
    WANTS_INPUT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Neighbouring programs work on neighbouring tiles of rows.
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + col, mask=col < num_cols, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(program * BLOCK_M, num_rows, tl.num_programs(1) * BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
        offset = row[:, None].to(tl.int64) * num_cols + col[None, :]
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        dx = dy * act_slope(x, ACTIVATION, dx_ptr.dtype.element_ty)
        if WANTS_INPUT:
            tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANTS_BIAS:
            total += tl.where(mask, dx, 0.0)
    if WANTS_BIAS:
        part = tl.cast(program, tl.int64) * num_cols + col
        tl.store(dbias_ptr + part, tl.sum(total, axis=0), mask=col < num_cols)


def forward(input: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    activation = GELU_VARIANTS[approximate]
    x = input.contiguous()
    output = torch.empty_like(x)
    if x.numel() == 0:
        return output
    num_cols = bias.numel()
    num_rows = x.numel() // num_cols
    tile = _tile(num_cols)
    tiles = triton.cdiv(num_rows, tile["BLOCK_M"]) * triton.cdiv(num_cols, tile["BLOCK_N"])
    launch = {"ACTIVATION": activation} | tile | _launch.FOUR_WARPS
    with _launch.device_of(x):
        _forward_kernel[(tiles,)](x, bias.contiguous(), output, num_rows, num_cols, **launch)
    return output


def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, input, bias, approximate, (wants_input, wants_bias) = args
    x = input.contiguous()
    dx = torch.empty_like(x) if wants_input else None
    if x.numel() == 0 or not (wants_input or wants_bias):
        return dx, torch.zeros_like(bias) if wants_bias else None
    num_cols = bias.numel()
    num_rows = x.numel() // num_cols
    tile = _tile(num_cols)
    grid, parts = _launch.column_sums_grid(x, num_cols, tile, sums=wants_bias)
    targets = (x if tensor is None else tensor for tensor in (dx, parts))
    tensors = (grad_output.contiguous(), x, bias.contiguous(), *targets)
    flags: dict[str, Any] = {"WANTS_INPUT": wants_input, "WANTS_BIAS": wants_bias}
    flags |= {"ACTIVATION": GELU_VARIANTS[approximate]}
    with _launch.device_of(x):
        _backward_kernel[grid](*tensors, num_rows, num_cols, **flags, **tile, **_launch.FOUR_WARPS)
        grad_bias = _launch.sum_rows(parts, bias.dtype)
    return dx, grad_bias


def _tile(num_cols: int) -> dict[str, int]:
    """Return rows and columns of a tile: 16 elements a thread, no more columns than there are."""
    block_n = min(_MAX_COLS, triton.next_power_of_2(num_cols))
    return {"BLOCK_M": _TILE // block_n, "BLOCK_N": block_n}
