"""Rows that move between tokens and experts, in Triton: what moe_permute and moe_unpermute share.

``scatter``: a program reads a piece of a token's row once and writes it to the rows of its slots.
``combine``: a program reads that piece of the token's kept rows, in slot order, and writes their
sum: no atomics, the same bits in every run. Few choices are unrolled, so that their loads are under
way together. Rows of dropped slots are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch

# Columns of a program: eight to sixteen elements a thread.
_BLOCK = 1024
_LAUNCH = {"BLOCK": _BLOCK} | _launch.FOUR_WARPS
_UNROLLED = 8


@triton.jit
def _scatter_slot(x, y_ptr, positions_ptr, slot, real, col, num_cols):
    row = tl.load(positions_ptr + slot)
    value = tl.where(row < real, x, tl.zeros_like(x))
    tl.store(y_ptr + row.to(tl.int64) * num_cols + col, value, mask=col < num_cols)


@triton.jit
def _scatter_kernel(
    x_ptr,
    y_ptr,
    positions_ptr,
    real_ptr,
    stride_x,
    num_cols,
    top_k,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(real_ptr)
    x = tl.load(x_ptr + token * stride_x + col, mask=col < num_cols, other=0.0)
    if TOP_K > 0:
        for j in tl.static_range(TOP_K):
            _scatter_slot(x, y_ptr, positions_ptr, token * TOP_K + j, real, col, num_cols)
    else:
        for j in range(top_k):
            _scatter_slot(x, y_ptr, positions_ptr, token * top_k + j, real, col, num_cols)


@triton.jit
def _combine_slot(
    total,
    x_ptr,
    probs_ptr,
    positions_ptr,
    slot,
    real,
    stride_x,
    col,
    num_cols,
    WEIGHTED: tl.constexpr,
):
    row = tl.load(positions_ptr + slot)
    mask = (col < num_cols) & (row < real)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + col, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        # Of a dropped slot any number may stand there: it must not meet the zeros.
        x *= tl.load(probs_ptr + slot, mask=row < real, other=0.0)
    return total + x


@triton.jit
def _combine_kernel(
    x_ptr,
    probs_ptr,
    y_ptr,
    positions_ptr,
    real_ptr,
    stride_x,
    num_cols,
    top_k,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(real_ptr)
    y = tl.zeros((BLOCK,), tl.float32)
    if TOP_K > 0:
        for j in tl.static_range(TOP_K):
            y = _combine_slot(
                y,
                x_ptr,
                probs_ptr,
                positions_ptr,
                token * TOP_K + j,
                real,
                stride_x,
                col,
                num_cols,
                WEIGHTED,
            )
    else:
        for j in range(top_k):
            y = _combine_slot(
                y,
                x_ptr,
                probs_ptr,
                positions_ptr,
                token * top_k + j,
                real,
                stride_x,
                col,
                num_cols,
                WEIGHTED,
            )
    tl.store(y_ptr + token * num_cols + col, y.to(y_ptr.dtype.element_ty), mask=col < num_cols)


def scatter(input: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[tokens * top_k, hidden]`` of ``[tokens, hidden]``."""
    tokens, top_k = positions.shape
    x = with_dense_rows(input)
    output = x.new_empty(tokens * top_k, x.shape[1])
    if output.numel() == 0:
        return output
    slots, num_cols = (positions.contiguous(), offsets[-1:]), x.shape[1]
    with _launch.device_of(x):
        _scatter_kernel[(tokens, triton.cdiv(num_cols, _BLOCK))](
            x, output, *slots, x.stride(0), num_cols, top_k, TOP_K=unrolled(top_k), **_LAUNCH
        )
    return output


def combine(
    input: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return ``[tokens, hidden]``, the (weighted) sum of each token's kept rows."""
    tokens, top_k = positions.shape
    x = with_dense_rows(input)
    output = x.new_empty(tokens, x.shape[1])
    if output.numel() == 0:
        return output
    num_cols = x.shape[1]
    tensors = (x, _launch.dense(probs, x), output, positions.contiguous(), offsets[-1:])
    choices = {"TOP_K": unrolled(top_k), "WEIGHTED": probs is not None}
    with _launch.device_of(x):
        _combine_kernel[(tokens, triton.cdiv(num_cols, _BLOCK))](
            *tensors, x.stride(0), num_cols, top_k, **choices, **_LAUNCH
        )
    return output


def with_dense_rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def unrolled(top_k: int) -> int:
    """Return ``top_k`` where the loop over choices is unrolled, else 0."""
    return top_k if top_k <= _UNROLLED else 0
