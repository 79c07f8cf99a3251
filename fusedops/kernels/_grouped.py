"""Products of groups of rows in Triton: what grouped_mm and moe_mlp share.

A program makes one tile of the rows of one group. Which one it finds itself, from the offsets on
the device: nothing waits for the host. The grid covers the most tiles that any offsets can need,
and programs without a tile end at once; rows past the last offset form a last group of zero tiles.
Rows may be gathered by an index list: the experts then read the rows of the tokens in place.

A weight gradient is a tile per group, summed over the group's rows in float32 in one program: the
same bits in every run, and it may be added to what is already there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch, _products
from fusedops.kernels._device import act_value, split
from fusedops.kernels._products import GROUP_M, bias_tile, load_weights, sum_of_pointers, tile_of

_SUM_TILE = {"BLOCK_M": 32, "BLOCK_N": 64}


@triton.jit
def group_bounds(group, offsets_ptr, num_groups, num_rows):
    """Return begin and end of groups.

    Index ``num_groups`` stands for the rows after the last group; higher indices are empty.
    """
    end = tl.load(offsets_ptr + group, mask=group < num_groups, other=num_rows)
    inner = (group > 0) & (group <= num_groups)
    begin = tl.load(offsets_ptr + group - 1, mask=inner, other=0)
    # Whatever the offsets hold, memory outside of the tensors is never touched.
    begin = tl.minimum(tl.maximum(begin, 0), num_rows)
    end = tl.minimum(tl.maximum(end, begin), num_rows)
    return begin, tl.where(group <= num_groups, end, begin)


@triton.jit
def find_group(
    tile, offsets_ptr, num_groups, num_rows, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the group of a row tile (``GROUPS`` for none), its first row and its group's end."""
    group = tl.arange(0, GROUPS)
    begin, end = group_bounds(group, offsets_ptr, num_groups, num_rows)
    tiles_up_to = tl.cumsum(tl.cdiv(end - begin, BLOCK_M), 0)
    found = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(group < found, tiles_up_to, 0), 0)
    first = tl.sum(tl.where(group == found, begin, 0), 0) + (tile - before) * BLOCK_M
    return found, first, tl.sum(tl.where(group == found, end, 0), 0)


@triton.jit
def _product_kernel(
    x_ptr,
    rows_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    offsets_ptr,
    kept_ptr,
    y_ptr,
    num_rows,
    row_tiles,
    num_groups,
    num_cols,
    depth,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wk,
    stride_wn,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    KEEPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_MODE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, col_tile = tile_of(
        tl.program_id(0), row_tiles * BLOCK_M, num_cols, GROUP_M, BLOCK_M, BLOCK_N
    )
    group, first_row, end = find_group(tile, offsets_ptr, num_groups, num_rows, GROUPS, BLOCK_M)
    if group > num_groups:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # Rows past the edge read the tile's first row; columns are masked, so that a row of weights
    # whose columns are neighbours in memory is read in whole vectors.
    row_read = tl.where(row < end, row, first_row)
    if GATHERS:
        row_read = tl.load(rows_ptr + row_read)
    depth_here = tl.where(group < num_groups, depth, 0)
    if GATHERS or TMA_MODE == "none":
        x_ptrs = x_ptr + row_read.to(tl.int64)[:, None] * stride_xm + k[None, :] * stride_xk
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if TMA_MODE == "none":
        weight_ptr += group.to(tl.int64) * stride_wg
        w_ptrs = weight_ptr + col.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
        in_cols = (col < num_cols)[None, :]
        total = sum_of_pointers(
            x_ptrs, w_ptrs, in_cols, depth_here, stride_xk, stride_wk, PRECISION
        )
    else:
        # The rows after the last group have neither bias nor weights.
        bias_cols = tl.where(group < num_groups, num_cols, 0)
        bias_row = bias_ptr + group.to(tl.int64) * num_cols
        total = bias_tile(bias_row, col, bias_cols, BLOCK_M, HAS_BIAS)
        if HAS_BIAS and SCALES:
            total = total * tl.load(scale_ptr + row, mask=row < end, other=0.0)[:, None]
        first_col = col_tile * BLOCK_N
        for first in range(0, depth_here, BLOCK_K):
            if GATHERS:
                x = tl.load(x_ptrs, mask=k[None, :] < depth - first, other=0.0)
                x_ptrs += BLOCK_K * stride_xk
            else:
                # Of a tile's rows past the group's last one nothing is stored.
                x = x_ptr.load([first_row, first])
            w = load_weights(weight_ptr, group, first, first_col, TMA_MODE, BLOCK_K, BLOCK_N)
            total = tl.dot(x, w, total, input_precision=PRECISION)
    # The tile is finished in parts: all of it at once would not leave registers for the epilogue.
    corner = first_row.to(tl.int64) * num_cols
    PART: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    parts = split(total, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        z = parts[part]
        part_col = col_tile * BLOCK_N + part * PART + tl.arange(0, PART)
        if HAS_BIAS and TMA_MODE == "none":
            valid = (part_col < num_cols) & (group < num_groups)
            bias = tl.load(bias_ptr + group.to(tl.int64) * num_cols + part_col, mask=valid, other=0)
            bias = bias.to(tl.float32)[None, :]
            if SCALES:
                bias = bias * tl.load(scale_ptr + row, mask=row < end, other=0.0)[:, None]
            z += bias
        mask = (row < end)[:, None] & (part_col < num_cols)[None, :]
        offset = tl.arange(0, BLOCK_M)[:, None] * num_cols + part_col[None, :]
        if KEEPS:
            tl.store(kept_ptr + corner + offset, z.to(kept_ptr.dtype.element_ty), mask=mask)
        dtype = y_ptr.dtype.element_ty
        y = act_value(z, ACTIVATION, dtype).to(dtype)
        tl.store(y_ptr + corner + offset, y, mask=mask)


@triton.jit
def _weight_gradient_kernel(
    x_ptr,
    x_rows_ptr,
    dy_ptr,
    dy_rows_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    num_groups,
    in_size,
    out_size,
    stride_xm,
    stride_xk,
    stride_ym,
    stride_yn,
    stride_og,
    stride_ok,
    stride_on,
    GATHERS_X: tl.constexpr,
    GATHERS_Y: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group = tl.program_id(1)
    begin, end = group_bounds(group, offsets_ptr, num_groups, num_rows)
    in_tile, out_tile = tile_of(tl.program_id(0), in_size, out_size, GROUP_M, BLOCK_M, BLOCK_N)
    # 64 bits: the stride of a column may be the number of rows.
    i = (in_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    j = (out_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    in_i, in_j = (i < in_size)[:, None], (j < out_size)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        mask = row < end
        x_row, y_row = row, row
        if GATHERS_X:
            x_row = tl.load(x_rows_ptr + row, mask=mask, other=0)
        if GATHERS_Y:
            y_row = tl.load(dy_rows_ptr + row, mask=mask, other=0)
        x_ptrs = (x_ptr + x_row.to(tl.int64) * stride_xm)[None, :] + i[:, None] * stride_xk
        y_ptrs = (dy_ptr + y_row.to(tl.int64) * stride_ym)[:, None] + j[None, :] * stride_yn
        x = tl.load(x_ptrs, mask=mask[None, :] & in_i, other=0.0)
        dy = tl.load(y_ptrs, mask=mask[:, None] & in_j, other=0.0)
        total = tl.dot(x, dy, total, input_precision=PRECISION)
    out_ptr += group.to(tl.int64) * stride_og
    PART: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    parts = split(total, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        part_j = out_tile * BLOCK_N + part * PART + tl.arange(0, PART)
        out_mask = in_i & (part_j < out_size)[None, :]
        offset = i[:, None] * stride_ok + part_j.to(tl.int64)[None, :] * stride_on
        value = parts[part]
        if ADDS:
            value += tl.load(out_ptr + offset, mask=out_mask, other=0.0)
        tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _row_sums_kernel(
    values_ptr,
    rows_ptr,
    scale_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    num_groups,
    num_cols,
    GATHERS: tl.constexpr,
    SCALES: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group = tl.program_id(1)
    begin, end = group_bounds(group, offsets_ptr, num_groups, num_rows)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        mask = row < end
        row_read = row
        if GATHERS:
            row_read = tl.load(rows_ptr + row, mask=mask, other=0)
        offset = row_read.to(tl.int64)[:, None] * num_cols + col[None, :]
        both = mask[:, None] & (col < num_cols)[None, :]
        value = tl.load(values_ptr + offset, mask=both, other=0.0).to(tl.float32)
        if SCALES:
            value *= tl.load(scale_ptr + row, mask=mask, other=0.0).to(tl.float32)[:, None]
        total += value
    out = out_ptr + group.to(tl.int64) * num_cols + col
    result = tl.sum(total, axis=0)
    if ADDS:
        result += tl.load(out, mask=col < num_cols, other=0.0)
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=col < num_cols)


def groups_block(num_groups: int) -> int:
    """Return the block that holds all groups and the rows after the last one."""
    return triton.next_power_of_2(num_groups + 1)


def row_tiles_of(num_rows: int, num_groups: int, block_m: int) -> int:
    """Return the most row tiles that the groups, and the rows after them, can have."""
    return num_rows // block_m + min(num_rows, num_groups + 1)


def product(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "identity",
    *,
    keeps: bool = False,
    rows: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``act(x W + b)`` per group and the pre-activation, if ``keeps``, or an empty tensor.

    The weights are ``[groups, K, N]`` of any strides. With ``rows``, dense int32, row ``r`` of the
    product is row ``rows[r]`` of ``input``. ``scale``, dense float32, multiplies the bias of each
    row. The result has the dtype of ``input``, or float32 for unrounded sums.
    """
    num_rows = input.shape[0] if rows is None else rows.shape[0]
    num_groups, depth, num_cols = weight.shape
    output = input.new_empty((num_rows, num_cols), dtype=dtype or input.dtype)
    kept = input.new_empty((num_rows, num_cols) if keeps else (0,))
    if output.numel() == 0:
        return output, kept
    gathers, mma_sync = rows is not None, _products.uses_mma_sync(input.device)
    rows_per_group = num_rows // max(1, num_groups)
    blocks, options = _product_blocks(
        input.dtype, rows_per_group, mma_sync=mma_sync, gathers=gathers
    )
    row_tiles = row_tiles_of(num_rows, num_groups, blocks["BLOCK_M"])
    tma_mode, (x, w) = _products.tma_operands(
        blocks, blocks["BLOCK_N"], input, weight.mT, gathers=gathers
    )
    operands = (x, offsets if rows is None else rows, weight if tma_mode == "none" else w)
    scales = offsets if scale is None else scale
    tensors = (*operands, _launch.dense(bias, input), scales, offsets.contiguous())
    sizes = (num_rows, row_tiles, num_groups, num_cols, depth)
    flags: dict[str, Any] = {"GATHERS": gathers, "HAS_BIAS": bias is not None, "KEEPS": keeps}
    flags |= {"SCALES": scale is not None, "ACTIVATION": activation, "TMA_MODE": tma_mode}
    flags |= {"PRECISION": _launch.precision(input.dtype), "GROUPS": groups_block(num_groups)}
    strides = (*input.stride(), *weight.stride())
    targets = (kept if keeps else output, output)
    with _launch.device_of(input):
        _product_kernel[(row_tiles * triton.cdiv(num_cols, blocks["BLOCK_N"]),)](
            *tensors, *targets, *sizes, *strides, **flags, GROUP_M=GROUP_M, **blocks, **options
        )
    return output, kept


def _product_blocks(
    dtype: torch.dtype, num_rows: int, *, mma_sync: bool, gathers: bool
) -> _launch.Tiling:
    """Return tile sizes and launch options; a list of few rows spills in steps of 64."""
    blocks, options = _products.blocks_of(dtype, num_rows, mma_sync=mma_sync)
    return blocks | ({"BLOCK_K": 32} if gathers and blocks["BLOCK_M"] == 16 else {}), options


def _gradient_blocks(dtype: torch.dtype, *, gathers: bool, mma_sync: bool) -> _launch.Tiling:
    """Return tile sizes and launch options of ``blocks_of``; reading a list ahead takes two stages.

    With a list float32 in one part spills under Triton 3.6.
    """
    blocks, options = _products.blocks_of(dtype, 4096, mma_sync=mma_sync)
    if gathers and dtype == torch.float32:
        blocks = blocks | {"EPILOGUE_PARTS": 4}
    return blocks, options | ({"num_stages": 5} if gathers else {})


def weight_gradient(
    x: torch.Tensor,
    dy: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    *,
    into: torch.Tensor | None = None,
    x_rows: torch.Tensor | None = None,
    dy_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x^T dy`` over the rows of each group, laid out as ``weight`` is.

    ``x_rows`` and ``dy_rows`` gather rows as in ``product``. With ``into``, float32 of the shape of
    ``weight`` and any strides, the gradient is added there, unrounded, and ``into`` is returned.
    """
    if into is not None:
        out = into
    elif not weight.is_contiguous() and weight.mT.is_contiguous():
        out = weight.new_empty(weight.mT.shape).mT
    else:
        out = weight.new_empty(weight.shape)
    if out.numel() == 0:
        return out
    num_groups, in_size, out_size = out.shape
    lists = [rows for rows in (x_rows, dy_rows) if rows is not None]
    num_rows = lists[0].shape[0] if lists else x.shape[0]
    mma_sync = _products.uses_mma_sync(x.device)
    blocks, options = _gradient_blocks(x.dtype, gathers=bool(lists), mma_sync=mma_sync)
    tiles = triton.cdiv(in_size, blocks["BLOCK_M"]) * triton.cdiv(out_size, blocks["BLOCK_N"])
    ends = offsets.contiguous()
    left, right = (
        (x, ends if x_rows is None else x_rows),
        (dy, ends if dy_rows is None else dy_rows),
    )
    sizes = (num_rows, num_groups, in_size, out_size)
    strides = (*x.stride(), *dy.stride(), *out.stride())
    flags: dict[str, Any] = {"GATHERS_X": x_rows is not None, "GATHERS_Y": dy_rows is not None}
    flags |= {"ADDS": into is not None, "PRECISION": _launch.precision(x.dtype)}
    with _launch.device_of(x):
        _weight_gradient_kernel[(tiles, num_groups)](
            *left,
            *right,
            ends,
            out,
            *sizes,
            *strides,
            **flags,
            GROUP_M=GROUP_M,
            **blocks,
            **options,
        )
    return out


def row_sums(
    values: torch.Tensor,
    offsets: torch.Tensor,
    *,
    into: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the float32 sums of the (scaled, gathered) rows of each group in the values' dtype.

    With a dense float32 ``into`` they are added there, unrounded, and ``into`` is returned.
    """
    num_groups, num_cols = offsets.shape[0], values.shape[1]
    out = values.new_empty((num_groups, num_cols)) if into is None else into
    if out.numel() == 0:
        return out
    num_rows = values.shape[0] if rows is None else rows.shape[0]
    ends = offsets.contiguous()
    indices = (ends if rows is None else rows, ends if scale is None else scale)
    tensors = (values.contiguous(), *indices, ends, out)
    flags = {"GATHERS": rows is not None, "SCALES": scale is not None, "ADDS": into is not None}
    with _launch.device_of(values):
        _row_sums_kernel[(triton.cdiv(num_cols, _SUM_TILE["BLOCK_N"]), num_groups)](
            *tensors, num_rows, num_groups, num_cols, **flags, **_SUM_TILE, **_launch.FOUR_WARPS
        )
    return out
