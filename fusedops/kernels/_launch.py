"""What every Triton launcher needs: device guard, stand-in pointers, partial sums, report cases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core import philox

# Launch options of kernels that keep little in registers.
FOUR_WARPS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}

# Tile sizes, and the launch options that belong to them.
Tiling = tuple[dict[str, int], dict[str, Any]]


def dense(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """Return the tensor laid out densely; for an absent one any pointer, which is never read."""
    return stand_in if tensor is None else tensor.contiguous()


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a guard that makes the tensor's GPU current: Triton launches on the current one."""
    return guard(tensor.device)


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a guard that makes a GPU current; of another device one that does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def dropout_arguments(p: float, num_cols: int, seed: torch.Tensor | None) -> dict[str, Any]:
    """Return what kernels that call ``_device.dropout`` need for rows of ``num_cols`` columns.

    Modes of dropout are ``"none"``, ``"all"``, ``"draw"`` and ``"select"``; the last two are
    ``"draw placed"`` and ``"select placed"`` for a seed with a place.
    """
    threshold = philox.threshold(p)
    if threshold == 0:
        mode = "none"
    elif threshold == 2**32:
        mode = "all"
    else:
        mode = "draw" if num_cols % 4 == 0 else "select"
        mode += " placed" if seed is not None and seed.numel() > 2 else ""
    # Kept when the word exceeds the limit: 32 bits then hold it, as a signed number for Triton.
    limit = threshold - 1
    signed = limit - 2**32 if limit >= 2**31 else limit
    return {"limit": signed, "scale": philox.scale(p), "DROPOUT": mode}


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products: ``"ieee"``, unless torch is set to TF32 for float32."""
    if dtype != torch.float32:
        return "ieee"
    # This covers the older settings of torch too; they raise once this one has been used.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@functools.cache
def num_programs(device: torch.device) -> int:
    """Return how many programs a reduction over rows uses: two per multiprocessor."""
    if device.type != "cuda":
        return 8  # the interpreter
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def column_sums_grid(
    matrix: torch.Tensor, num_cols: int, tile: dict[str, int], *, sums: bool
) -> tuple[tuple[int, int], torch.Tensor | None]:
    """Return the grid of programs that walk down tiles of columns, and where they put their sums.

    ``tile``: ``BLOCK_M`` and ``BLOCK_N``; ``sums``: whether programs add up rows for ``sum_rows``.
    """
    col_tiles = triton.cdiv(num_cols, tile["BLOCK_N"])
    programs = triton.cdiv(matrix.numel() // num_cols, tile["BLOCK_M"])
    if not sums:
        return (col_tiles, min(programs, 65535)), None
    # About eight programs a multiprocessor keep enough loads in flight, and few parts to add.
    programs = min(programs, triton.cdiv(4 * num_programs(matrix.device), col_tiles))
    return (col_tiles, programs), matrix.new_empty((programs, num_cols), dtype=torch.float32)


def row_programs(device: torch.device, num_rows: int, num_warps: int) -> int:
    """Return how many programs walk the rows of a reduction, each with ``num_warps``.

    16 warps a multiprocessor keep enough loads under way. What each program leaves to be added is
    a row of float32 numbers: more than two programs only where each has eight rows or more.
    """
    two = num_programs(device)
    return min(num_rows, max(two, min(two * resident(num_warps) // 2, num_rows // 8)))


def resident(num_warps: int) -> int:
    """Return how many programs ``row_programs`` gives a multiprocessor."""
    return max(2, 16 // num_warps)


def row_options(elements: int) -> dict[str, Any]:
    """Launch options for a program that holds ``elements`` float32 values: 16 to 32 a thread."""
    num_warps = max(1, min(16, elements // 512))
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}


@triton.jit
def _sum_rows_kernel(
    parts_ptr, out_ptr, num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_rows, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
        offset = row[:, None].to(tl.int64) * num_cols + col[None, :]
        total += tl.load(parts_ptr + offset, mask=mask, other=0.0)
    summed = tl.sum(total, axis=0)
    tl.store(out_ptr + col, summed.to(out_ptr.dtype.element_ty), mask=col < num_cols)


def sum_rows(
    parts: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> torch.Tensor | None:
    """Add float32 partial rows ``[programs, columns]`` in a fixed order; ``None`` stays ``None``.

    Returns ``[columns]``, or the same in a ``shape``.
    """
    if parts is None:
        return None
    num_rows, num_cols = parts.shape
    out = parts.new_empty((num_cols,), dtype=dtype)
    _sum_rows_kernel[(triton.cdiv(num_cols, 32),)](
        parts, out, num_rows, num_cols, BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2
    )
    return out if shape is None else out.reshape(shape)
