"""scaled_masked_softmax in Triton: forward, backward, launchers.

Rows up to 16384 columns stand in registers: the input and the mask are read once, the result is
written once. Longer rows are read twice, with an online maximum and sum. The rows are walked so
that those that share a row of the mask follow one another; the gradient of a mask is added over
them in registers by one program (or a few, whose parts are added in order): no atomics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core.capability import compute_capability
from fusedops.kernels import _launch
from fusedops.kernels._device import exp
from fusedops.kernels._triton_version import at_least

_MAX_BLOCK = 16384
_LONG_BLOCK = 4096


@triton.jit
def _locate(index, size_1, size_2, row_0, row_1, row_2, mask_0, mask_1, mask_2):
    """Return which row of the input is row ``index`` of the walk, and where its mask begins."""
    i2 = (index % size_2).to(tl.int64)
    i1 = (index // size_2 % size_1).to(tl.int64)
    i0 = (index // size_2 // size_1).to(tl.int64)
    return i0 * row_0 + i1 * row_1 + i2 * row_2, i0 * mask_0 + i1 * mask_1 + i2 * mask_2


@triton.jit
def _scores(x_ptr, mask_ptr, scale, there, col, last, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    """Return scaled and masked float32 scores: -inf where nothing counts.

    ``there`` says where the tensors go on, ``last`` is the last column that causality leaves.
    """
    inside = there
    if CAUSAL:
        inside = there & (col <= last)
        there = there & (col // 8 <= last // 8)  # whole 16-byte loads
    s = tl.load(x_ptr, mask=there, other=0.0).to(tl.float32) * scale
    if MASK == "additive":
        s += tl.load(mask_ptr, mask=there, other=0.0).to(tl.float32)
    elif MASK == "keep":
        inside = inside & (tl.load(mask_ptr, mask=there, other=0) != 0)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def _forward_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    num_rows,
    num_cols,
    queries,
    scale,
    size_1,
    size_2,
    row_0,
    row_1,
    row_2,
    mask_0,
    mask_1,
    mask_2,
    MASK: tl.constexpr,
    MASK_COL: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, first = _locate(index, size_1, size_2, row_0, row_1, row_2, mask_0, mask_1, mask_2)
    col = tl.arange(0, BLOCK_N)[None, :]
    there = (index < num_rows)[:, None] & (col < num_cols)
    offset = row[:, None] * num_cols + col
    mask_offset = first[:, None] + col * MASK_COL
    last = (row.to(tl.int32) % queries)[:, None]  # a 64-bit remainder is a subroutine
    s = _scores(x_ptr + offset, mask_ptr + mask_offset, scale, there, col, last, MASK, CAUSAL)
    peak = tl.max(s, axis=1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    e = exp(s - peak[:, None])
    total = tl.sum(e, axis=1)
    y = e * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _forward_long_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    num_cols,
    queries,
    scale,
    size_1,
    size_2,
    row_0,
    row_1,
    row_2,
    mask_0,
    mask_1,
    mask_2,
    MASK: tl.constexpr,
    MASK_COL: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, first = _locate(
        tl.program_id(0), size_1, size_2, row_0, row_1, row_2, mask_0, mask_1, mask_2
    )
    x_ptr += row * num_cols
    y_ptr += row * num_cols
    mask_ptr += first
    last = row.to(tl.int32) % queries
    seen = num_cols
    if CAUSAL:
        seen = tl.minimum(num_cols, last + 1)
    peak = tl.full((), float("-inf"), tl.float32)
    shift = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, seen, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        there = col < num_cols
        s = _scores(x_ptr + col, mask_ptr + col * MASK_COL, scale, there, col, last, MASK, CAUSAL)
        higher = tl.maximum(peak, tl.max(s, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * exp(peak - shift) + tl.sum(exp(s - shift), axis=0)
        peak = higher
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    for start in range(0, num_cols, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        there = col < num_cols
        s = _scores(x_ptr + col, mask_ptr + col * MASK_COL, scale, there, col, last, MASK, CAUSAL)
        y = exp(s - shift) * inverse
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _along(products, values):
    """Return ``sum(dy * y) / sum(y)``; the sum of y is 1 but for its rounding, or 0."""
    return products / tl.where(values == 0.0, 1.0, values)


@triton.jit
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr, num_rows, num_cols, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = (row < num_rows)[:, None] & (col < num_cols)
    offset = row[:, None].to(tl.int64) * num_cols + col
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    along = _along(tl.sum(dy * y, axis=1), tl.sum(y, axis=1))
    dx = scale * y * (dy - along[:, None])
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_long_kernel(dy_ptr, y_ptr, dx_ptr, num_cols, scale, BLOCK_N: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * num_cols
    products = tl.zeros((BLOCK_N,), tl.float32)
    values = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + start_of_row + col, mask=col < num_cols, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + start_of_row + col, mask=col < num_cols, other=0.0).to(tl.float32)
        products += dy * y
        values += y
    along = _along(tl.sum(products, axis=0), tl.sum(values, axis=0))
    for start in range(0, num_cols, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + start_of_row + col, mask=col < num_cols, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + start_of_row + col, mask=col < num_cols, other=0.0).to(tl.float32)
        dx = scale * y * (dy - along)
        tl.store(dx_ptr + start_of_row + col, dx.to(dx_ptr.dtype.element_ty), mask=col < num_cols)


@triton.jit
def _backward_mask_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    dmask_ptr,
    num_cols,
    sharing,
    rows_per_chunk,
    scale,
    size_1,
    size_2,
    row_0,
    row_1,
    row_2,
    WANTS_INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group = tl.program_id(0)
    chunk = tl.program_id(1)
    col = tl.arange(0, BLOCK_N)
    mask = col < num_cols
    total = tl.zeros((BLOCK_N,), tl.float32)
    end = tl.minimum(sharing, (chunk + 1) * rows_per_chunk)
    for i in range(chunk * rows_per_chunk, end):
        row, _ = _locate(group * sharing + i, size_1, size_2, row_0, row_1, row_2, 0, 0, 0)
        offset = row * num_cols + col
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = y * (dy - _along(tl.sum(dy * y, axis=0), tl.sum(y, axis=0)))
        if WANTS_INPUT:
            tl.store(dx_ptr + offset, (scale * grad).to(dx_ptr.dtype.element_ty), mask=mask)
        total += grad
    part = (group * tl.num_programs(1) + chunk).to(tl.int64) * num_cols
    tl.store(dmask_ptr + part + col, total.to(dmask_ptr.dtype.element_ty), mask=mask)


def forward(
    input: torch.Tensor, mask: torch.Tensor | None, scale: float, is_causal: bool
) -> torch.Tensor:
    x = input.contiguous()
    output = torch.empty_like(x)
    if x.numel() == 0:
        return output
    num_cols, queries = x.shape[-1], x.shape[-2]
    num_rows = x.numel() // num_cols
    kind, mask_col = "none", 0
    dims = _dims(x.shape, (), ())
    if mask is not None:
        kind = "keep" if mask.dtype == torch.bool else "additive"
        for dim in range(mask.dim()):
            if mask.stride(dim) == 0:
                mask = mask.narrow(dim, 0, 1)
        mask_col = 0 if mask.dim() == 0 or mask.shape[-1] == 1 else 1
        if mask_col == 1 and mask.stride(-1) != 1:
            mask = mask.contiguous()
        dims = _dims(x.shape, mask.shape, mask.stride())
        if len(dims) > 3:
            mask = mask.expand(*x.shape[:-1], mask.shape[-1]).contiguous()
            dims = _dims(x.shape, mask.shape, mask.stride())
        if kind == "keep":
            mask = mask.view(torch.uint8)
    tensors = (x, x if mask is None else mask, output)
    arguments = (num_cols, queries, scale, *_walk(dims))
    form = {"MASK": kind, "MASK_COL": mask_col, "CAUSAL": is_causal}
    with _launch.device_of(x):
        if num_cols > _MAX_BLOCK:
            launch = {"BLOCK_N": _LONG_BLOCK} | _launch.row_options(_LONG_BLOCK)
            _forward_long_kernel[(num_rows,)](*tensors, *arguments, **form, **launch)
        else:
            tile, options = _tile(num_cols)
            _forward_kernel[(triton.cdiv(num_rows, tile["BLOCK_M"]),)](
                *tensors, num_rows, *arguments, **form, **tile, **options
            )
    return output


def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, mask, output, scale, _, (wants_input, wants_mask) = args
    y = output.contiguous()
    dx = torch.empty_like(y) if wants_input else None
    if y.numel() == 0 or not (wants_input or wants_mask):
        return dx, torch.zeros_like(mask) if wants_mask and mask is not None else None
    dy = grad_output.contiguous()
    num_cols = y.shape[-1]
    num_rows = y.numel() // num_cols
    if wants_mask:
        assert mask is not None
        if num_cols > _MAX_BLOCK:
            # Such rows and their sum do not fit in registers: torch sums the gradient of the mask.
            grad = y.new_empty(y.shape, dtype=torch.float32)
            _launch_long(dy, y, grad, 1.0)
            dx = (grad * scale).to(y.dtype) if wants_input else None
            return dx, grad.sum_to_size(mask.shape).to(mask.dtype)
        return dx, _backward_mask(dy, y, dx, mask, scale)
    assert dx is not None
    if num_cols > _MAX_BLOCK:
        _launch_long(dy, y, dx, scale)
        return dx, None
    tile, options = _tile(num_cols)
    with _launch.device_of(y):
        _backward_kernel[(triton.cdiv(num_rows, tile["BLOCK_M"]),)](
            dy, y, dx, num_rows, num_cols, scale, **tile, **options
        )
    return dx, None


def _launch_long(dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float) -> None:
    num_cols = y.shape[-1]
    options = _long_options((compute_capability(y.device) or (0,))[0])
    with _launch.device_of(y):
        _backward_long_kernel[(y.numel() // num_cols,)](
            dy, y, dx, num_cols, scale, BLOCK_N=_LONG_BLOCK, **options
        )


def _backward_mask(
    dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor | None, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    num_cols = y.shape[-1]
    num_rows = y.numel() // num_cols
    # The gradient of a mask with whole rows, dense: a row of it for each row of the mask.
    shape = [*mask.shape[:-1], num_cols] if mask.dim() else [num_cols]
    dims = _dims(y.shape, shape, _dense_strides(shape))
    if len(dims) > 3:
        shape = list(y.shape)
        dims = _dims(shape, shape, _dense_strides(shape))
    sharing = math.prod(size for size, _, stride in dims if stride == 0)
    rows_per_chunk = max(32, triton.cdiv(sharing, 32))
    chunks = triton.cdiv(sharing, rows_per_chunk)
    final = chunks == 1 and shape == list(mask.shape)
    dtype = mask.dtype if final else torch.float32
    parts = y.new_empty((num_rows // sharing, chunks, num_cols), dtype=dtype)
    block_n = triton.next_power_of_2(num_cols)
    tensors = (dy, y, y if dx is None else dx, parts)
    sizes = (num_cols, sharing, rows_per_chunk)
    launch = {"BLOCK_N": block_n} | _launch.row_options(2 * block_n)
    with _launch.device_of(y):
        _backward_mask_kernel[(num_rows // sharing, chunks)](
            *tensors, *sizes, scale, *_walk(dims)[:5], WANTS_INPUT=dx is not None, **launch
        )
    if final:
        return parts.reshape(mask.shape)
    return parts.sum(1).reshape(shape).sum_to_size(mask.shape).to(mask.dtype)


def _dense_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _dims(
    sizes: Sequence[int], mask_sizes: Sequence[int], mask_strides: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return size, stride in rows and stride in the mask of each dimension of the walk.

    Neighbours that memory joins are one; those over which the mask is broadcast come last.
    """
    dims: list[tuple[int, int, int]] = []  # from the last to the first
    count = 1
    for d in reversed(range(len(sizes) - 1)):
        of_mask = d - (len(sizes) - len(mask_sizes))
        stride = mask_strides[of_mask] if of_mask >= 0 and mask_sizes[of_mask] > 1 else 0
        if sizes[d] > 1:
            if dims and stride == dims[-1][0] * dims[-1][2]:
                dims[-1] = (dims[-1][0] * sizes[d], *dims[-1][1:])
            else:
                dims.append((sizes[d], count, stride))
        count *= sizes[d]
    dims.reverse()
    return [dim for dim in dims if dim[2] != 0] + [dim for dim in dims if dim[2] == 0]


def _walk(dims: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return the arguments of ``_locate`` after the index, for at most three dimensions."""
    padded = [(1, 0, 0)] * (3 - len(dims)) + list(dims)
    sizes, rows, masks = zip(*padded, strict=True)
    return (*sizes[1:], *rows, *masks)


def _tile(num_cols: int) -> _launch.Tiling:
    """Return rows and columns of a tile of one program, and launch options."""
    block_n = triton.next_power_of_2(num_cols)
    block_m = max(1, 1024 // block_n)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}, _launch.row_options(block_m * block_n)


def _long_options(major: int) -> dict[str, Any]:
    """Launch options of the backward of long rows; Triton 3.6 spills eight warps on sm_100.

    ``major`` is the first number of the GPU's compute capability.
    """
    spills = major == 10 and not at_least(3, 7)
    return _launch.row_options(_LONG_BLOCK) | ({"num_warps": 16} if spills else {})
