"""layer_norm in Triton: forward, backward, launchers.

A row of up to ``_MAX_FUSED`` columns is held in registers: the forward reads the input once and
writes the output once. Longer rows are walked in blocks (statistics by a second pass over data that
the L2 cache still holds) instead of spilling registers.

The backward runs a fixed number of programs per device. Each walks its rows, keeps its part of the
weight and bias gradients in float32 registers and writes it once; a second kernel adds the parts in
order. No atomics: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch

# Columns that the backward holds in registers beside its two float32 accumulators.
_MAX_FUSED = 8192
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
    mean = tl.sum(x, axis=1) / num_cols
    centred = tl.where(mask, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / num_cols
    rstd = 1.0 / tl.sqrt(variance + eps)
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
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
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * num_cols
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        total += tl.load(x_ptr + start + col, mask=col < num_cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / num_cols
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
        y = (tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean)
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
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * num_cols + col
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalized = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        if WANTS_WEIGHT:
            dweight += dy * normalized
        if WANTS_BIAS:
            dbias += dy
        if WANTS_INPUT:
            scaled = dy
            if HAS_WEIGHT:
                scaled = dy * weight
            along = tl.sum(scaled * normalized, axis=0) / num_cols
            across = tl.sum(scaled, axis=0) / num_cols
            dx = (scaled - across - normalized * along) * rstd
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
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * num_cols
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    along = tl.zeros((BLOCK_N,), tl.float32)
    across = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        mask = col < num_cols
        scaled = tl.load(dy_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            scaled *= tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        along += scaled * (x - mean) * rstd
        across += scaled
    mean_along = tl.sum(along, axis=0) / num_cols
    mean_across = tl.sum(across, axis=0) / num_cols
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        mask = col < num_cols
        scaled = tl.load(dy_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            scaled *= tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        dx = (scaled - mean_across - (x - mean) * rstd * mean_along) * rstd
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
            dweight += dy * (x - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row)
        dbias += dy
    part = tl.cast(program, tl.int64) * num_cols + col
    if WANTS_WEIGHT:
        tl.store(dweight_ptr + part, dweight, mask=mask)
    if WANTS_BIAS:
        tl.store(dbias_ptr + part, dbias, mask=mask)


def forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::layer_norm``."""
    x = input.contiguous()
    leading = x.shape[: x.dim() - len(normalized_shape)]
    output = torch.empty_like(x)
    mean = x.new_empty(leading, dtype=torch.float32)
    rstd = x.new_empty(leading, dtype=torch.float32)
    num_rows = mean.numel()
    if x.numel() == 0:
        return output, mean, rstd
    num_cols = x.numel() // num_rows
    arguments = (x, _launch.dense(weight, x), _launch.dense(bias, x), output, mean, rstd)
    present = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    with _launch.device_of(x):
        if num_cols > 2 * _MAX_FUSED:
            _forward_long_kernel[(num_rows,)](
                *arguments, num_cols, eps, **present, BLOCK_N=_LONG_BLOCK, **_options(_LONG_BLOCK)
            )
        else:
            block_n = triton.next_power_of_2(num_cols)
            block_m = max(1, min(16, 1024 // block_n))
            _forward_kernel[(triton.cdiv(num_rows, block_m),)](
                *arguments,
                num_rows,
                num_cols,
                eps,
                **present,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                **_options(block_m * block_n),
            )
    return output, mean, rstd


def backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; arguments and results are those of ``fusedops::layer_norm_backward``."""
    x = input.contiguous()
    dy = grad_output.contiguous()
    num_rows = mean.numel()
    wants = dict(zip(("WANTS_INPUT", "WANTS_WEIGHT", "WANTS_BIAS"), output_mask, strict=True))
    dtype = x.dtype if weight is None else weight.dtype
    if x.numel() == 0:
        empty = [torch.zeros_like(x)]
        empty += [x.new_zeros(normalized_shape, dtype=dtype) for _ in range(2)]
        return tuple(
            each if wanted else None for each, wanted in zip(empty, output_mask, strict=True)
        )
    num_cols = x.numel() // num_rows
    dx = torch.empty_like(x) if wants["WANTS_INPUT"] else None
    programs = min(num_rows, _launch.num_programs(x.device))
    parts = [
        x.new_empty((programs, num_cols), dtype=torch.float32) if wanted else None
        for wanted in output_mask[1:]
    ]
    w = _launch.dense(weight, x)
    statistics = (mean.contiguous(), rstd.contiguous())
    targets = [x if each is None else each for each in (dx, *parts)]
    with _launch.device_of(x):
        if num_cols <= _MAX_FUSED:
            block_n = triton.next_power_of_2(num_cols)
            _backward_kernel[(programs,)](
                dy,
                x,
                w,
                *statistics,
                *targets,
                num_rows,
                num_cols,
                HAS_WEIGHT=weight is not None,
                **wants,
                BLOCK_N=block_n,
                **_options(2 * block_n),
            )
        else:
            shape = (num_rows, num_cols, programs)
            _backward_long(dy, x, w, statistics, targets, shape, weight is not None, wants)
        sums = [
            None if each is None else _launch.sum_rows(each, dtype).reshape(normalized_shape)
            for each in parts
        ]
    return dx, *sums


def _backward_long(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    targets: list[torch.Tensor],
    shape: tuple[int, int, int],
    has_weight: bool,
    wants: dict[str, bool],
) -> None:
    dx, dweight, dbias = targets
    num_rows, num_cols, programs = shape
    if wants["WANTS_INPUT"]:
        _backward_input_long_kernel[(num_rows,)](
            dy,
            x,
            w,
            *statistics,
            dx,
            num_cols,
            HAS_WEIGHT=has_weight,
            BLOCK_N=_LONG_BLOCK,
            **_options(_LONG_BLOCK),
        )
    if wants["WANTS_WEIGHT"] or wants["WANTS_BIAS"]:
        _backward_parameters_long_kernel[(triton.cdiv(num_cols, 1024), programs)](
            dy,
            x,
            *statistics,
            dweight,
            dbias,
            num_rows,
            num_cols,
            WANTS_WEIGHT=wants["WANTS_WEIGHT"],
            WANTS_BIAS=wants["WANTS_BIAS"],
            BLOCK_N=1024,
            **_options(1024),
        )


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "mean_ptr": "*fp32", "rstd_ptr": "*fp32"}
    sizes = {"num_rows": "i32", "num_cols": "i32"}
    forward = pointers | sizes | {"bias_ptr": "*bf16", "y_ptr": "*bf16", "eps": "fp32"}
    backward = pointers | sizes | {"dy_ptr": "*bf16", "dx_ptr": "*bf16"}
    backward |= {"dweight_ptr": "*fp32", "dbias_ptr": "*fp32"}
    present = {"HAS_WEIGHT": True, "HAS_BIAS": True}
    wants = {"WANTS_WEIGHT": True, "WANTS_BIAS": True}
    cases = []
    for cols in (1024, 4096, 8192, 16384):
        rows = max(1, 1024 // cols)
        cases.append(
            _launch.report_case(
                _forward_kernel,
                forward,
                present | {"BLOCK_M": rows, "BLOCK_N": cols},
                _options(rows * cols),
            )
        )
    for cols in (1024, 4096, 8192):
        cases.append(
            _launch.report_case(
                _backward_kernel,
                backward,
                wants | {"HAS_WEIGHT": True, "WANTS_INPUT": True, "BLOCK_N": cols},
                _options(2 * cols),
            )
        )
    long = {"BLOCK_N": _LONG_BLOCK}
    cases += [
        _launch.report_case(_forward_long_kernel, forward, present | long, _options(_LONG_BLOCK)),
        _launch.report_case(
            _backward_input_long_kernel,
            backward,
            {"HAS_WEIGHT": True} | long,
            _options(_LONG_BLOCK),
        ),
        _launch.report_case(
            _backward_parameters_long_kernel, backward, wants | {"BLOCK_N": 1024}, _options(1024)
        ),
    ]
    return cases


def _options(elements: int) -> dict[str, Any]:
    """Launch options for a program that holds ``elements`` float32 values: 16 to 32 a thread."""
    num_warps = max(1, min(16, elements // 512))
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}
