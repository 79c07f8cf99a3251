"""Matrix products in Triton: the order of tiles, their sizes, loads and sums that ops share.

Tiles of the output are walked in groups of rows, so that the tiles that run together share operands
in the L2 cache; sums are float32. Operands are read by pointers or, where GPU and layout permit it,
by descriptors (TMA). ``TMA_MODE`` is ``"none"``, ``"plain"`` (elements of a sum are neighbours in
the memory of the weights) or ``"transposed"`` (their columns are).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _descriptors, _launch
from fusedops.kernels._descriptors import describable

GROUP_M = 8


@triton.jit
def tile_of(
    program, num_rows, num_cols, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return row and column of a program's tile: groups of ``GROUP_M`` rows, down the columns.

    0 says that all rows are in one tile.
    """
    if GROUP_M == 0:
        return program * 0, program
    else:
        row_tiles = tl.cdiv(num_rows, BLOCK_M)
        group_size = GROUP_M * tl.cdiv(num_cols, BLOCK_N)
        first_tile = program // group_size * GROUP_M
        group_rows = tl.minimum(row_tiles - first_tile, GROUP_M)
        row_tile = first_tile + program % group_size % group_rows
        return row_tile, program % group_size // group_rows


@triton.jit
def sum_of_pointers(x_ptrs, w_ptrs, in_cols, depth, stride_xk, stride_wk, PRECISION: tl.constexpr):
    """Return the float32 tile ``x w`` from pointers to its first blocks along ``depth``.

    ``in_cols`` says which columns of ``w`` are read, all where it is ``None``.
    """
    BLOCK_K: tl.constexpr = x_ptrs.shape[1]
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((x_ptrs.shape[0], w_ptrs.shape[1]), tl.float32)
    for first in range(0, depth, BLOCK_K):
        left = depth - first
        w_mask = k[:, None] < left
        if in_cols is not None:
            w_mask = w_mask & in_cols
        x = tl.load(x_ptrs, mask=k[None, :] < left, other=0.0)
        w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    return total


@triton.jit
def load_weights(
    weight, group, first, col, TMA_MODE: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the block ``[K, N]`` at ``first`` along the sum and column ``col``, by descriptor.

    ``group`` is the index of a matrix in ``[groups, ...]``, ``None`` for one matrix.
    """
    if group is None:
        if TMA_MODE == "transposed":
            return weight.load([first, col])
        else:
            return weight.load([col, first]).T
    else:
        if TMA_MODE == "transposed":
            return tl.reshape(weight.load([group, first, col]), (BLOCK_K, COLUMNS))
        else:
            return tl.reshape(weight.load([group, col, first]), (COLUMNS, BLOCK_K)).T


@triton.jit
def bias_tile(bias_ptr, col, num_cols, BLOCK_M: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the float32 tile that a sum begins with: the bias in each row, or zeros.

    Added behind the sum it would be 32 loads of four bytes a thread; here it is one wide load,
    which arrives while the first operands do.
    """
    start = tl.zeros((BLOCK_M, col.shape[0]), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=col < num_cols, other=0.0)
        start += bias.to(tl.float32)[None, :]
    return start


def tma_operands(
    blocks: dict[str, int], columns: int, x: torch.Tensor, *weights: Any, gathers: bool = False
) -> tuple[str, tuple[Any, ...]]:
    """Return ``TMA_MODE`` and the operands, as descriptors where that is possible.

    ``x`` is ``[rows, K]``, a tensor still if a list ``gathers`` its rows; of the weights
    ``[..., N, K]`` a tile reads ``columns`` each. For few rows the host's work for a descriptor,
    microseconds, is worth more than what it saves.
    """
    left = () if gathers else (x,)
    plain = describable(*left, *weights)
    transposed = describable(*left, *(weight.mT for weight in weights))
    if blocks["BLOCK_M"] < 128 or not (plain or transposed):
        return "none", (x, *weights)
    depth, describe = blocks["BLOCK_K"], _descriptors.describe
    leading = [1] * (weights[0].dim() - 2)
    operand = x if gathers else describe(x, [blocks["BLOCK_M"], depth])
    if plain:
        return "plain", (operand, *(describe(w, [*leading, columns, depth]) for w in weights))
    block = [*leading, depth, columns]
    return "transposed", (operand, *(describe(w.mT, block) for w in weights))


def uses_mma_sync(device: torch.device) -> bool:
    """Return whether a GPU multiplies operands in registers: one of before sm_90, and sm_120."""
    return not _descriptors.available(device)


def blocks_of(dtype: torch.dtype, num_rows: int, *, mma_sync: bool) -> _launch.Tiling:
    """Return tile sizes and launch options: half precision fills the matrix units of sm_90.

    With ``mma_sync`` steps of 64 would leave too few registers for 128 x 256 sums: Triton 3.8
    spills there. Four steps of 32 fit the 99 KB of sm_86, sm_89 and sm_120.
    """
    options = {"enable_fp_fusion": True}
    if dtype == torch.float32:
        blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "EPILOGUE_PARTS": 1}
        return blocks, options | {"num_warps": 4, "num_stages": 3}
    if num_rows <= 64:
        block_m = 16 if num_rows <= 16 else 64
        blocks = {"BLOCK_M": block_m, "BLOCK_N": 128, "BLOCK_K": 64, "EPILOGUE_PARTS": 1}
        return blocks, options | {"num_warps": 4, "num_stages": 4}
    block_k = 32 if mma_sync else 64
    blocks = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": block_k, "EPILOGUE_PARTS": 8}
    return blocks, options | {"num_warps": 8, "num_stages": 4}


def group_of(num_rows: int, blocks: dict[str, int]) -> int:
    """Return ``GROUP_M`` of ``tile_of``: a row of tiles alone needs no divisions to be found."""
    return GROUP_M if num_rows > blocks["BLOCK_M"] else 0
