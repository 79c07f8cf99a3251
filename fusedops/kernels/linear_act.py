"""linear_act in Triton: a matrix product whose tiles get bias and activation before the store.

Forward: one kernel (``_products.py``). The only other result written is the pre-activation, if it
is saved.

Backward: one pass makes the gradient of the pre-activation and the bias gradient (float32 parts
per program, added in order by a second kernel: the same bits in every run). Both products are then
plain, without an epilogue to fuse, and go to torch's own matmul (cuBLAS).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core.layouts import as_matrix
from fusedops.kernels import _launch, _products
from fusedops.kernels._device import act_both, act_value, split, with_slope
from fusedops.kernels._products import bias_tile, load_weights, sum_of_pointers, tile_of

_GRADIENT_TILE = {"BLOCK_M": 8, "BLOCK_N": 256}


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    kept_ptr,
    y_ptr,
    num_rows,
    num_cols,
    depth,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    HAS_BIAS: tl.constexpr,
    KEEPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_MODE: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_tile, col_tile = tile_of(tl.program_id(0), num_rows, num_cols, GROUP_M, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if TMA_MODE == "none":
        k = tl.arange(0, BLOCK_K)
        # Rows past the edge read row 0: loads need a mask along k only.
        row_read = tl.where(row < num_rows, row, 0).to(tl.int64)
        col_read = tl.where(col < num_cols, col, 0).to(tl.int64)
        x_ptrs = x_ptr + row_read[:, None] * stride_xm + k[None, :] * stride_xk
        w_ptrs = weight_ptr + col_read[None, :] * stride_wn + k[:, None] * stride_wk
        total = sum_of_pointers(x_ptrs, w_ptrs, None, depth, stride_xk, stride_wk, PRECISION)
    else:
        # The first two arguments are descriptors.
        first_col = col_tile * BLOCK_N
        total = bias_tile(bias_ptr, col, num_cols, BLOCK_M, HAS_BIAS)
        for first in range(0, depth, BLOCK_K):
            x = x_ptr.load([row_tile * BLOCK_M, first])
            w = load_weights(weight_ptr, None, first, first_col, TMA_MODE, BLOCK_K, BLOCK_N)
            total = tl.dot(x, w, total, input_precision=PRECISION)
    # The tile is finished in parts: all of it at once would not leave registers for the epilogue.
    # The tile's corner is a 64-bit offset, positions inside it are 32-bit.
    corner = row_tile.to(tl.int64) * BLOCK_M * num_cols
    PART: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    parts = split(total, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        z = parts[part]
        part_col = col_tile * BLOCK_N + part * PART + tl.arange(0, PART)
        if HAS_BIAS and TMA_MODE == "none":
            bias = tl.load(bias_ptr + part_col, mask=part_col < num_cols, other=0.0)
            z += bias.to(tl.float32)[None, :]
        mask = (row < num_rows)[:, None] & (part_col < num_cols)[None, :]
        offset = tl.arange(0, BLOCK_M)[:, None] * num_cols + part_col[None, :]
        if KEEPS:
            tl.store(kept_ptr + corner + offset, z.to(kept_ptr.dtype.element_ty), mask=mask)
        dtype = y_ptr.dtype.element_ty
        y = act_value(z, ACTIVATION, dtype).to(dtype)
        tl.store(y_ptr + corner + offset, y, mask=mask)


@triton.jit
def _gradient_kernel(
    dy_ptr,
    kept_ptr,
    dz_ptr,
    hidden_ptr,
    dbias_ptr,
    num_rows,
    num_cols,
    ACTIVATION: tl.constexpr,
    WANTS_GRAD: tl.constexpr,
    WANTS_HIDDEN: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(program * BLOCK_M, num_rows, tl.num_programs(1) * BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
        offset = row[:, None].to(tl.int64) * num_cols + col[None, :]
        dz = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION != "identity" or WANTS_HIDDEN:
            z = tl.load(kept_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            value, slope = act_both(z, ACTIVATION, dz_ptr.dtype.element_ty)
            dz = with_slope(dz, slope, z, ACTIVATION)
            if WANTS_HIDDEN:
                hidden = value.to(hidden_ptr.dtype.element_ty)
                tl.store(hidden_ptr + offset, hidden, mask=mask)
        if WANTS_GRAD:
            tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if WANTS_BIAS:
            total += tl.where(mask, dz, 0.0)
    if WANTS_BIAS:
        part = tl.cast(program, tl.int64) * num_cols + col
        tl.store(dbias_ptr + part, tl.sum(total, axis=0), mask=col < num_cols)


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, weight, bias, activation, keep_preactivation = args
    keeps = keep_preactivation and activation != "identity"
    return linear(input, weight, bias, activation, keeps)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``act(input weight^T + bias)`` and the pre-activation (or an empty tensor)."""
    shape = (*input.shape[:-1], weight.shape[0])
    output = input.new_empty(shape)
    kept = input.new_empty(shape if keeps else (0,))
    if output.numel() == 0:
        return output, kept
    x = as_matrix(input)
    num_rows, depth = x.shape
    num_cols = weight.shape[0]
    mma_sync = _products.uses_mma_sync(x.device)
    blocks, options = _products.blocks_of(x.dtype, num_rows, mma_sync=mma_sync)
    tiles = triton.cdiv(num_rows, blocks["BLOCK_M"]) * triton.cdiv(num_cols, blocks["BLOCK_N"])
    tma_mode, operands = _products.tma_operands(blocks, blocks["BLOCK_N"], x, weight)
    tensors = (*operands, _launch.dense(bias, x), kept if keeps else output, output)
    sizes = (num_rows, num_cols, depth, *x.stride(), *weight.stride())
    flags = {"HAS_BIAS": bias is not None, "KEEPS": keeps, "ACTIVATION": activation}
    flags |= {"PRECISION": _launch.precision(input.dtype), "TMA_MODE": tma_mode}
    flags |= {"GROUP_M": _products.group_of(num_rows, blocks)}
    with _launch.device_of(x):
        _forward_kernel[(tiles,)](*tensors, *sizes, **flags, **blocks, **options)
    return output, kept


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, weight, bias, preactivation, activation, _, output_mask = args
    dy = as_matrix(grad_output.contiguous())
    wants_product = output_mask[0] or output_mask[1]
    kept = preactivation
    if activation != "identity" and kept.numel() == 0:
        kept, _ = linear(input, weight, bias, "identity", False)
    dz, _, dbias = activation_gradient(
        dy, kept, activation, wants_grad=wants_product, wants_bias=output_mask[2]
    )
    return (
        (dz @ weight).reshape(input.shape) if output_mask[0] else None,
        weight_gradient(dz, as_matrix(input), weight) if output_mask[1] else None,
        dbias,
    )


def activation_gradient(
    dy: torch.Tensor,
    kept: torch.Tensor,
    activation: str,
    *,
    wants_grad: bool,
    wants_bias: bool,
    wants_hidden: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return ``dy * act'(kept)``, ``act(kept)`` and the column sums of the first, in one pass.

    Both matrices are dense. For the identity the gradient is ``dy`` itself, and ``kept``, the
    pre-activation, is only read for ``act(kept)``.
    """
    num_rows, num_cols = dy.shape
    writes_grad = wants_grad and activation != "identity"
    dz = torch.empty_like(dy) if writes_grad else dy
    hidden = torch.empty_like(dy) if wants_hidden else None
    if not (writes_grad or wants_bias or wants_hidden):
        return dz, None, None
    if dy.numel() == 0:
        return dz, hidden, dy.new_zeros(num_cols) if wants_bias else None
    grid, parts = _launch.column_sums_grid(dy, num_cols, _GRADIENT_TILE, sums=wants_bias)
    targets = (dy if tensor is None else tensor for tensor in (hidden, parts))
    wants = {"WANTS_GRAD": writes_grad, "WANTS_HIDDEN": wants_hidden, "WANTS_BIAS": wants_bias}
    launch = _GRADIENT_TILE | _launch.FOUR_WARPS
    with _launch.device_of(dy):
        _gradient_kernel[grid](
            dy, kept, dz, *targets, num_rows, num_cols, ACTIVATION=activation, **wants, **launch
        )
        dbias = _launch.sum_rows(parts, dy.dtype)
    return dz, hidden, dbias


def weight_gradient(dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``dz^T x``, laid out as ``weight`` is: a transposed weight gets a transposed one."""
    if not weight.is_contiguous() and weight.t().is_contiguous():
        return (x.t() @ dz).t()
    return dz.t() @ x
