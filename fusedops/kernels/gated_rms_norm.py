"""gated_rms_norm in Triton: forward, backward, launchers.

A program has rows of one group, whole, in registers: the forward reads input and gate once and
writes the output once. The backward runs a fixed number of programs per device. Each walks its
rows, keeps its part of the weight gradient in float32 registers and writes it once; a second kernel
adds the parts in order. No atomics: the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._device import act_both, sigmoid
from fusedops.kernels._norm_rows import scale_of, statistics

# Elements of a group that a program holds in registers.
_MAX_SIZE = 8192
# A square that is fused with the sum of the other lanes' squares is not rounded as these are: each
# lane would have another last bit of the row's statistic.
_UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def _opened(gate, ACTIVATION: tl.constexpr):
    """Return the activation of the gate and its derivative."""
    if ACTIVATION == "silu":
        return act_both(gate, "silu", tl.float32)
    else:
        return sigmoid(gate)


@triton.jit
def _forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    stride_x,
    stride_gate,
    num_rows,
    num_cols,
    eps,
    NORM_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.arange(0, BLOCK_N)
    col = group * num_cols + place
    mask = (row < num_rows)[:, None] & (place < num_cols)[None, :]
    x_at = x_ptr + row[:, None] * stride_x + col[None, :]
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    gate_at = gate_ptr + row[:, None] * stride_gate + col[None, :]
    opened, _ = _opened(tl.load(gate_at, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if not NORM_FIRST:
        x *= opened
    x, _, rstd = statistics(x, mask, num_cols, eps, False)
    y = x * rstd[:, None] * scale_of(weight_ptr, 0.0, col, place < num_cols, HAS_WEIGHT)[None, :]
    if NORM_FIRST:
        y *= opened
    y_at = y_ptr + row[:, None] * (groups * num_cols) + col[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row * groups + group, rstd, mask=row < num_rows)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    stride_dy,
    stride_x,
    stride_gate,
    num_rows,
    num_cols,
    NORM_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANTS_INPUT: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Neighbouring programs work on neighbouring tiles of rows.
    program = tl.program_id(0)
    group, groups = tl.program_id(1), tl.num_programs(1)
    place = tl.arange(0, BLOCK_N)
    col = group * num_cols + place
    col_mask = place < num_cols
    # The weight of long rows is loaded where it is needed: registers would spill.
    LONG: tl.constexpr = BLOCK_N > 4096
    if not LONG:
        weight = scale_of(weight_ptr, 0.0, col, col_mask, HAS_WEIGHT)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(program * BLOCK_M, num_rows, tl.num_programs(0) * BLOCK_M):
        row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        row_mask = row < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        dy_at = dy_ptr + row[:, None] * stride_dy + col[None, :]
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        x_at = x_ptr + row[:, None] * stride_x + col[None, :]
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        gate_at = gate_ptr + row[:, None] * stride_gate + col[None, :]
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * groups + group, mask=row_mask, other=0.0)[:, None]
        opened, slope = _opened(gate, ACTIVATION)
        # What is normalised, and the gradient of the scaled result.
        normed = x * rstd if NORM_FIRST else x * opened * rstd
        of_norm = dy * opened if NORM_FIRST else dy
        if WANTS_WEIGHT:
            dweight += of_norm * normed
        if LONG:
            weight = scale_of(weight_ptr, 0.0, col, col_mask, HAS_WEIGHT)[None, :]
        scaled = of_norm * weight
        along = tl.sum(scaled * normed, axis=1)[:, None] / num_cols
        total = (scaled - normed * along) * rstd
        out = row[:, None] * (groups * num_cols) + col[None, :]
        if WANTS_INPUT:
            dx = total if NORM_FIRST else total * opened
            tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANTS_GATE:
            of_gate = dy * normed * weight if NORM_FIRST else total * x
            dgate = (of_gate * slope).to(dgate_ptr.dtype.element_ty)
            tl.store(dgate_ptr + out, dgate, mask=mask)
    if WANTS_WEIGHT:
        part = tl.cast(program, tl.int64) * (groups * num_cols) + col
        tl.store(dweight_ptr + part, tl.sum(dweight, axis=0), mask=col_mask)


def supports(*args: Any) -> str | None:
    """Return why the kernels cannot run a call, or ``None``."""
    return _too_long(args[0], args[3])


def supports_backward(*args: Any) -> str | None:
    """Return why the kernels cannot run a backward, or ``None``."""
    return _too_long(args[1], args[5])


def _too_long(input: torch.Tensor, groups: int) -> str | None:
    if input.shape[-1] // groups > _MAX_SIZE:
        return f"groups of more than {_MAX_SIZE} elements do not fit in registers"
    return None


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, gate, weight, groups, eps, norm_before_gate, activation = args
    output = input.new_empty(input.shape)
    rstd = input.new_empty((*input.shape[:-1], groups), dtype=torch.float32)
    if input.numel() == 0:
        return output, rstd
    x, g = _rows(input), _rows(gate)
    size = input.shape[-1] // groups
    tile, options = _tile(size)
    flags = {"NORM_FIRST": norm_before_gate, "ACTIVATION": activation}
    flags |= {"HAS_WEIGHT": weight is not None} | tile
    tensors = (x, g, _launch.dense(weight, x), output, rstd)
    numbers = (x.stride(0), g.stride(0), len(x), size, eps)
    with _launch.device_of(x):
        grid = (triton.cdiv(len(x), tile["BLOCK_M"]), groups)
        _forward_kernel[grid](*tensors, *numbers, **flags, **options | _UNFUSED)
    return output, rstd


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, gate, weight, rstd, groups, _, norm_before_gate, activation, wants = args
    dx, dgate = (input.new_empty(input.shape) if needed else None for needed in wants[:2])
    if input.numel() == 0 or not any(wants):
        return dx, dgate, torch.zeros_like(weight) if wants[2] else None
    dy, x, g = _rows(grad_output), _rows(input), _rows(gate)
    size = input.shape[-1] // groups
    tile, options = _tile(size)
    tiles = triton.cdiv(len(x), tile["BLOCK_M"])
    programs = _launch.row_programs(x.device, tiles, options["num_warps"])
    parts = None
    if wants[2]:
        parts = x.new_empty((programs, input.shape[-1]), dtype=torch.float32)
    targets = (x if tensor is None else tensor for tensor in (dx, dgate, parts))
    tensors = (dy, x, g, _launch.dense(weight, x), rstd.contiguous(), *targets)
    names = ("WANTS_INPUT", "WANTS_GATE", "WANTS_WEIGHT")
    flags = {"NORM_FIRST": norm_before_gate, "ACTIVATION": activation}
    flags |= {"HAS_WEIGHT": weight is not None} | dict(zip(names, wants, strict=True)) | tile
    numbers = (dy.stride(0), x.stride(0), g.stride(0), len(x), size)
    with _launch.device_of(x):
        _backward_kernel[(programs, groups)](*tensors, *numbers, **flags, **options)
        grad_weight = _launch.sum_rows(parts, x.dtype if weight is None else weight.dtype)
    return dx, dgate, grad_weight


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a matrix of dense rows, without a copy where possible."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(size: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return rows and columns of a tile, 1024 elements or one row, and the launch options."""
    block_n = triton.next_power_of_2(size)
    block_m = max(1, min(16, 1024 // block_n))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}, _launch.row_options(2 * block_m * block_n)
