"""baddbmm in Triton: a batch of matrix products whose tiles get the addend before the store.

Forward: one kernel for the whole batch. Operands and addend are read where they lie, with a stride
of 0 along broadcast dimensions; sums are float32. Batch dimensions that lie evenly in memory are
merged first; an operand with more than three that do not is made dense.

Backward: the products have no epilogue and go to torch's own matmul (cuBLAS), in float32 where they
are then summed over broadcast dimensions; the addend's gradient is torch's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._device import split
from fusedops.kernels._products import GROUP_M, blocks_of, tile_of, uses_mma_sync
from fusedops.kernels._triton_version import at_least

_BATCH_DIMS = 3
# Products of a launch: what the second dimension of a grid may be, and a part of 2^31, so that
# none counts past it: a launch's index is 32-bit, or 64-bit from its first product on.
_LAUNCH = 32768


@triton.jit
def _forward_kernel(
    addend_ptr,
    a_ptr,
    b_ptr,
    y_ptr,
    beta,
    alpha,
    num_rows,
    num_cols,
    depth,
    first_batch,
    size_1,
    size_2,
    stride_a0,
    stride_a1,
    stride_a2,
    stride_b0,
    stride_b1,
    stride_b2,
    stride_c0,
    stride_c1,
    stride_c2,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    HAS_ADDEND: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Divided as narrow as it comes: GPUs divide 64 bits in a subroutine.
    batch = first_batch + tl.program_id(1)
    outer = batch // size_2
    index_2 = (batch % size_2).to(tl.int64)
    index_1 = (outer % size_1).to(tl.int64)
    index_0 = (outer // size_1).to(tl.int64)
    a_ptr += index_0 * stride_a0 + index_1 * stride_a1 + index_2 * stride_a2
    b_ptr += index_0 * stride_b0 + index_1 * stride_b1 + index_2 * stride_b2
    y_ptr += batch.to(tl.int64) * num_rows * num_cols
    row_tile, col_tile = tile_of(tl.program_id(0), num_rows, num_cols, GROUP_M, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the edge read row 0; columns are masked: a row of b is then read in whole vectors.
    row_read = tl.where(row < num_rows, row, 0).to(tl.int64)
    a_ptrs = a_ptr + row_read[:, None] * stride_am + k[None, :] * stride_ak
    b_ptrs = b_ptr + k[:, None].to(tl.int64) * stride_bk + col.to(tl.int64)[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, depth, BLOCK_K):
        left = depth - first
        a = tl.load(a_ptrs, mask=k[None, :] < left, other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (col[None, :] < num_cols), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if HAS_ADDEND:
        addend_ptr += index_0 * stride_c0 + index_1 * stride_c1 + index_2 * stride_c2
    # The tile is finished in parts: all of it at once would not leave registers for the epilogue.
    corner = row_tile.to(tl.int64) * BLOCK_M * num_cols
    PART: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    parts = split(total, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        part_col = col_tile * BLOCK_N + part * PART + tl.arange(0, PART)
        mask = (row < num_rows)[:, None] & (part_col < num_cols)[None, :]
        y = alpha * parts[part]
        if HAS_ADDEND:
            c_offset = row_read[:, None] * stride_cm + part_col.to(tl.int64)[None, :] * stride_cn
            y += beta * tl.load(addend_ptr + c_offset, mask=mask, other=0.0).to(tl.float32)
        offset = tl.arange(0, BLOCK_M)[:, None] * num_cols + part_col[None, :]
        tl.store(y_ptr + corner + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


def forward(*args: Any) -> torch.Tensor:
    input, batch1, batch2, beta, alpha, _ = args
    leading = torch.broadcast_shapes(batch1.shape[:-2], batch2.shape[:-2])
    num_rows, num_cols, depth = batch1.shape[-2], batch2.shape[-1], batch1.shape[-1]
    output = batch1.new_empty((*leading, num_rows, num_cols))
    if output.numel() == 0:
        return output
    operands = [
        batch1.expand(*leading, *batch1.shape[-2:]),
        batch2.expand(*leading, *batch2.shape[-2:]),
        input.expand(output.shape) if beta != 0 else output,
    ]
    sizes, strides = merged(leading, [operand.stride()[:-2] for operand in operands])
    if len(sizes) > _BATCH_DIMS:
        operands = [operand.contiguous() for operand in operands]
        sizes, strides = merged(leading, [operand.stride()[:-2] for operand in operands])
    missing = _BATCH_DIMS - len(sizes)
    sizes = [1] * missing + sizes
    a, b, addend = operands
    blocks, options = _blocks(batch1.dtype, num_rows, mma_sync=uses_mma_sync(batch1.device))
    tiles = triton.cdiv(num_rows, blocks["BLOCK_M"]) * triton.cdiv(num_cols, blocks["BLOCK_N"])
    batches = leading.numel()
    tensors = (addend, a, b, output)
    numbers = (beta, alpha, num_rows, num_cols, depth)
    steps = [stride for row in strides for stride in [0] * missing + row]
    steps += [stride for operand in operands for stride in operand.stride()[-2:]]
    flags = {"HAS_ADDEND": beta != 0, "PRECISION": _launch.precision(output.dtype)}
    flags |= {"GROUP_M": GROUP_M} | blocks | options
    with _launch.device_of(batch1):
        for first in range(0, batches, _LAUNCH):
            _forward_kernel[(tiles, min(batches - first, _LAUNCH))](
                *tensors, *numbers, first, *sizes[1:], *steps, **flags
            )
    return output


def merged(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions along which every operand walks evenly; drop those of size 1.

    ``strides`` has a row for each operand. The result are the sizes that are left, outermost first,
    and their strides.
    """
    kept: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        here = [row[dim] for row in strides]
        if kept and all(
            step[-1] == stride * size for step, stride in zip(steps, here, strict=True)
        ):
            kept[-1] *= size
            for step, stride in zip(steps, here, strict=True):
                step[-1] = stride
        else:
            kept.append(size)
            for step, stride in zip(steps, here, strict=True):
                step.append(stride)
    return kept, steps


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, batch1, batch2, beta, alpha, broadcast, output_mask = args
    grad_input = None
    dims = [dim for dim, is_broadcast in enumerate(broadcast) if is_broadcast]
    if output_mask[0] and dims:
        summed = grad_output.sum(dims, keepdim=True, dtype=torch.float32)
        grad_input = (beta * summed).to(grad_output.dtype)
    elif output_mask[0] and beta != 1:
        grad_input = (beta * grad_output).contiguous()
    return (
        grad_input,
        _operand_gradient(grad_output, batch2.mT, batch1, alpha) if output_mask[1] else None,
        _operand_gradient(batch1.mT, grad_output, batch2, alpha) if output_mask[2] else None,
    )


def _operand_gradient(
    a: torch.Tensor, b: torch.Tensor, operand: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Return ``alpha a b`` summed to the shape of ``operand``, with its memory layout."""
    if not operand.is_contiguous() and operand.mT.is_contiguous():
        return _operand_gradient(b.mT, a.mT, operand.mT, alpha).mT
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if leading == operand.shape[:-2]:
        product = torch.matmul(a, b)
        return (product if alpha == 1 else alpha * product).contiguous()
    product = torch.matmul(a.float(), b.float()).sum_to_size(operand.shape)
    return (alpha * product).to(operand.dtype).contiguous()


def _blocks(dtype: torch.dtype, num_rows: int, *, mma_sync: bool) -> _launch.Tiling:
    """Return ``blocks_of``; Triton 3.8 spills float32 with three stages on sm_90."""
    blocks, options = blocks_of(dtype, num_rows, mma_sync=mma_sync)
    spills = dtype == torch.float32 and not mma_sync and at_least(3, 8) and not at_least(3, 9)
    return blocks, options | ({"num_stages": 2} if spills else {})
