"""The four norms in Triton: kernels and launchers of layer norm and RMS norm, alone or after a sum.

A row of up to ``_MAX_FORWARD`` columns (in the backward ``_MAX_BACKWARD``) stays in registers: the
forward reads each input once and writes each output once. Longer rows are walked in blocks
(statistics by a second pass over data that the L2 cache still holds) instead of spilling registers.
Their residual sum is the kernel of ``bias_dropout_add``: one more pass over the sum.

The backward runs a fixed number of programs per device. Each walks its rows, keeps its part of the
weight and bias gradients in float32 registers and writes it once; a second kernel adds the parts in
order. No atomics: the same bits in every run. The dropout mask is drawn from the element's index,
never stored.

``CENTRED`` distinguishes layer norm from RMS norm, which has no mean: its pointer is then not read.
``_norm_rows.py`` contains the formulas of a row in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core.capability import compute_capability
from fusedops.kernels import _launch, bias_dropout_add
from fusedops.kernels._device import dropout
from fusedops.kernels._norm_arguments import NormArguments, scaled_dtype
from fusedops.kernels._norm_rows import (
    affine,
    load_row,
    normalized,
    renormalized,
    row_gradient,
    scale_of,
    statistics,
)

# Columns of a row that a program holds in registers. At 32768 the forward spills (sm_90); the
# backward also has two float32 accumulators.
_MAX_FORWARD = 16384
_MAX_BACKWARD = 8192
_LONG_BLOCK = 4096


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
    HAS_RESIDUAL: tl.constexpr,
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
    if HAS_RESIDUAL:
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


def launchers(*, centred: bool, residual: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    form = NormArguments(centred=centred, residual=residual)

    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        normed, summed, mean, rstd = _forward(centred, form.read(args))
        outputs = (normed, summed) if residual else (normed,)
        return (*outputs, mean, rstd) if centred else (*outputs, rstd)

    def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
        call, needs = form.read_backward(args)
        gradients = _backward(centred, call, (*needs, False)[:4])
        return gradients[0 if residual else 1 :][: len(form.inputs)]

    return forward, backward


def _forward(centred: bool, call: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    """Launch the forward; returns normed, the normalised rows, mean (rstd for RMS norm) and rstd.

    The rows are ``residual + dropout(input)``, or ``input`` without a residual.
    """
    weight, bias, seed = call.weight, call.bias, call.seed
    x = call.input.contiguous()
    r = x if call.residual is None else call.residual.contiguous()
    rstd = r.new_empty(r.shape[: r.dim() - len(call.normalized_shape)], dtype=torch.float32)
    num_rows = rstd.numel()
    num_cols = r.numel() // num_rows if r.numel() else 0
    is_long = num_cols > _MAX_FORWARD
    if is_long and call.residual is not None:
        summed = bias_dropout_add.forward(x, None, r, seed, call.dropout_p, x.dtype)
        plain = vars(call) | {"input": summed, "residual": None}
        return _forward(centred, SimpleNamespace(**plain))
    summed = x if call.residual is None else torch.empty_like(r)
    normed = torch.empty_like(r, dtype=scaled_dtype(r.dtype, weight, call.rounding))
    mean = torch.empty_like(rstd) if centred else rstd
    if r.numel() == 0:
        return normed, summed, mean, rstd
    parameters = (_launch.dense(weight, r), _launch.dense(bias, r))
    numbers = (num_cols, call.eps, call.weight_offset)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    flags |= {"CENTRED": centred, "ROUND_FIRST": call.rounding == "hf"}
    with _launch.device_of(r):
        if is_long:
            launch = {"BLOCK_N": _LONG_BLOCK} | _launch.row_options(_LONG_BLOCK)
            _forward_long_kernel[(num_rows,)](
                x, *parameters, normed, mean, rstd, *numbers, **flags, **launch
            )
        else:
            block_n = triton.next_power_of_2(num_cols)
            block_m = max(1, min(16, 1024 // block_n))
            launch = {"BLOCK_M": block_m, "BLOCK_N": block_n}
            launch |= _launch.row_options(block_m * block_n)
            flags["HAS_RESIDUAL"] = call.residual is not None
            tensors = (x, r, *parameters, _launch.dense(seed, r), normed, summed, mean, rstd)
            dropout = _launch.dropout_arguments(call.dropout_p, num_cols, seed)
            _forward_kernel[(triton.cdiv(num_rows, block_m),)](
                *tensors, num_rows, *numbers, **dropout, **flags, **launch
            )
    return normed, summed, mean, rstd


def _backward(
    centred: bool, call: SimpleNamespace, wants: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; returns the requested gradients of input, residual, weight and bias.

    A norm without a residual asks for that of ``residual``: the gradient of the normalised rows.
    """
    x, weight, seed = call.summed.contiguous(), call.weight, call.seed
    wants_input, wants_residual, *wants_parameters = wants
    if x.numel() == 0:
        dtype = x.dtype if weight is None else weight.dtype
        zeros = (x.new_zeros(call.normalized_shape, dtype=dtype) for _ in wants_parameters)
        return (
            torch.empty_like(x, dtype=call.input_dtype) if wants_input else None,
            torch.empty_like(x) if wants_residual else None,
            *(zero if on else None for zero, on in zip(zeros, wants_parameters, strict=True)),
        )
    statistics = (
        call.rstd if call.mean is None else call.mean.contiguous(),
        call.rstd.contiguous(),
    )
    parameters: list[torch.Tensor | None] = [None, None]
    total = call.grad_summed
    if call.grad_normed is not None:
        if x.numel() // call.rstd.numel() <= _MAX_BACKWARD:
            return _backward_short(centred, call, x, statistics, wants)
        wants_long = (wants_input or wants_residual, *wants_parameters)
        total, parameters = _backward_long(centred, call, x, statistics, wants_long)
        if total is not None and call.grad_summed is not None:
            total = total + call.grad_summed
    dx = None
    if wants_input:
        step = (None, seed, call.dropout_p, call.input_dtype, (True, False, False))
        dx = bias_dropout_add.backward(total, *step)[0]
        dx = total.clone(memory_format=torch.contiguous_format) if dx is None else dx
    if not wants_residual:
        total = None
    elif call.grad_normed is None:
        total = total.clone(memory_format=torch.contiguous_format)
    return dx, total, *parameters


def _backward_short(
    centred: bool,
    call: SimpleNamespace,
    x: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    wants: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward of rows that fit in registers."""
    num_rows = call.rstd.numel()
    num_cols = x.numel() // num_rows
    dx = torch.empty_like(x, dtype=call.input_dtype) if wants[0] else None
    dresidual = torch.empty_like(x) if wants[1] else None
    block_n = triton.next_power_of_2(num_cols)
    options = _backward_options(block_n, newest=(compute_capability(x.device) or (0,))[0] == 12)
    programs = _launch.row_programs(x.device, num_rows, options["num_warps"])
    parts = _parts(x, programs, num_cols, wants[2:])
    grads = (call.grad_normed.contiguous(), _launch.dense(call.grad_summed, x))
    tensors = (*grads, x, _launch.dense(call.weight, x), *statistics, _launch.dense(call.seed, x))
    targets = (x if tensor is None else tensor for tensor in (dx, dresidual, *parts))
    dropout = _launch.dropout_arguments(call.dropout_p, num_cols, call.seed)
    flags = {"CENTRED": centred, "HAS_WEIGHT": call.weight is not None}
    flags["HAS_DSUMMED"] = call.grad_summed is not None
    names = ("WANTS_INPUT", "WANTS_RESIDUAL", "WANTS_WEIGHT", "WANTS_BIAS")
    flags |= zip(names, wants, strict=True)
    numbers = (num_rows, num_cols, call.weight_offset)
    launch = {"BLOCK_N": block_n} | options
    with _launch.device_of(x):
        _backward_kernel[(programs,)](*tensors, *targets, *numbers, **dropout, **flags, **launch)
        return dx, dresidual, *_added(parts, call)


def _backward_long(
    centred: bool,
    call: SimpleNamespace,
    x: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    wants: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Launch the backward of rows that are walked in blocks, without that of the sum."""
    num_rows = call.rstd.numel()
    num_cols = x.numel() // num_rows
    dx = torch.empty_like(x) if wants[0] else None
    programs = min(num_rows, _launch.num_programs(x.device))
    parts = _parts(x, programs, num_cols, wants[1:])
    dy = call.grad_normed.contiguous()
    with _launch.device_of(x):
        if dx is not None:
            launch = {"BLOCK_N": _LONG_BLOCK} | _launch.row_options(_LONG_BLOCK)
            flags = {"CENTRED": centred, "HAS_WEIGHT": call.weight is not None}
            tensors = (dy, x, _launch.dense(call.weight, x), *statistics, dx)
            _backward_input_long_kernel[(num_rows,)](
                *tensors, num_cols, call.weight_offset, **flags, **launch
            )
        if any(wants[1:]):
            targets = [x if part is None else part for part in parts]
            flags = {"CENTRED": centred, "WANTS_WEIGHT": wants[1], "WANTS_BIAS": wants[2]}
            launch = {"BLOCK_N": 1024} | _launch.row_options(1024)
            _backward_parameters_long_kernel[(triton.cdiv(num_cols, 1024), programs)](
                *(dy, x, *statistics, *targets, num_rows, num_cols), **flags, **launch
            )
        return dx, _added(parts, call)


def _parts(
    x: torch.Tensor, programs: int, num_cols: int, wants: Sequence[bool]
) -> list[torch.Tensor | None]:
    shape = (programs, num_cols)
    return [x.new_empty(shape, dtype=torch.float32) if needed else None for needed in wants]


def _added(
    parts: Sequence[torch.Tensor | None], call: SimpleNamespace
) -> list[torch.Tensor | None]:
    dtype = call.summed.dtype if call.weight is None else call.weight.dtype
    return [_launch.sum_rows(part, dtype, call.normalized_shape) for part in parts]


def _backward_options(block_n: int, *, newest: bool) -> dict[str, Any]:
    """Return launch options; 16 warps spill rows of 8192 on sm_120 (``newest``), Triton 3.6."""
    options = _launch.row_options(2 * block_n)
    return options | ({"num_warps": 32} if newest and block_n > 4096 else {})
