"""attention_decode in Triton: flash-decoding, the keys of a sequence shared out among programs.

A step of generation has few queries and many keys: its time is that of reading the cache once. All
query heads that share a key head are rows of one tile, so that each key and value is read once. The
cache is cut into parts whose number depends on its capacity alone, neither on lengths (the host
does not know them) nor on the batch (a sequence's result is the same bits in any batch). A program
per part writes output and log-sum-exp of its keys; a second kernel merges the parts that a sequence
has, in order. Parts past a sequence's end, or before its window, return at once. With a single
part, the first kernel writes the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core import env
from fusedops.kernels import _launch
from fusedops.kernels._attention_device import LN2, LOG2E, load_tile, scores
from fusedops.kernels._attention_launch import generation_of, has_batch, readable
from fusedops.kernels._attention_launch import supports as supports

# Numbers that a kernel need not know: another cache then needs no new compilation.
NOT_SPECIALIZED = ("num_tiles", "num_parts", "num_heads", "num_rows", "capacity", "left")

_MOST_PARTS = 64
_SMALLEST_PART = 128


@triton.jit
def _length(lengths_ptr, n, capacity):
    """Return the keys of a sequence, and whether the number is none that a cache can have.

    No key is read then, and the result is NaN: compiled code and captured graphs look no more.
    """
    length = tl.load(lengths_ptr + n)
    wrong = (length < 0) | (length > capacity)
    return tl.where(wrong, 0, length).to(tl.int32), wrong


@triton.jit
def _keys_of(length, num_rows, left, part_size, LEFT: tl.constexpr):
    """Return the first key that any query of a sequence may attend, and the parts with such."""
    first = 0
    if LEFT:
        first = tl.maximum(length - num_rows - left, 0)
    return first, first // part_size, tl.cdiv(length, part_size)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def parts_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_slope,
    num_tiles,
    num_parts,
    num_heads,
    num_rows,
    part_size,
    capacity,
    factor,
    bound,
    left,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Attend one part of the keys; ``WHOLE`` if there is but one, and the result is the op's."""
    part = tl.program_id(0) % num_parts
    rest = tl.program_id(0) // num_parts
    tile = rest % num_tiles
    rest = rest // num_tiles
    key_heads = num_heads // GROUP
    kh = rest % key_heads
    n = rest // key_heads
    length, wrong = _length(lengths_ptr, n, capacity)
    first, first_part, past_parts = _keys_of(length, num_rows, left, part_size, LEFT)
    if not WHOLE:  # noqa: SIM102 (this one is known at compile time)
        if (part < first_part) | (part >= past_parts):
            return
    # Rows of the tile: the new tokens of each query head of the group.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < GROUP * num_rows
    h = kh * GROUP + row // num_rows
    i = row % num_rows
    place = i + length - num_rows
    wide_n, wide_kh = n.to(tl.int64), kh.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    at = wide_n * stride_qb + h.to(tl.int64) * stride_qh + i.to(tl.int64) * stride_qs
    q_mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=q_mask, other=0.0)
    slope = 0.0
    if ALIBI:
        slopes = tl.load(slopes_ptr + n * stride_slope + h, mask=exists, other=0.0)
        slope = (slopes * LOG2E)[:, None]
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS and WHOLE:
        top = tl.load(sinks_ptr + h, mask=exists, other=float("-inf")) * LOG2E
        total += tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    col = tl.arange(0, BLOCK_N)
    begin = tl.maximum(part * part_size, first // BLOCK_N * BLOCK_N)
    end = tl.minimum((part + 1) * part_size, length)
    k_base = k_ptr + wide_n * stride_kb + wide_kh * stride_kh
    v_base = v_ptr + wide_n * stride_vb + wide_kh * stride_vh
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        wide = tl.cast(start, tl.int64)
        left_over = length - start
        k = load_tile(k_base + wide * stride_ks, col, stride_ks, left_over, HEAD_DIM, BLOCK_D, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        distance = (start + col)[None, :] - place[:, None]
        s, _ = scores(s, distance, 0.0, slope, factor, bound, SOFTCAP, ALIBI, "none")
        allowed = distance <= 0
        if LEFT:
            allowed = allowed & (distance >= -left)
        s = tl.where(allowed, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(top - shift)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        top = new_top
        v = load_tile(
            v_base + wide * stride_vs, col, stride_vs, left_over, VALUE_DIM, BLOCK_DV, True
        )
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = tl.where(wrong, float("nan"), acc * (1.0 / divisor)[:, None])
    lse = tl.where(total == 0.0, float("-inf"), top * LN2 + tl.log(divisor))
    # Parts lie [B, H, Sq, parts]; the op's output [B, Sq, H], its log-sum-exp [B, H, Sq].
    statistics = (wide_n * num_heads + h) * num_rows + i
    if WHOLE:
        place_out = (wide_n * num_rows + i) * num_heads + h
    else:
        statistics = statistics * num_parts + part
        place_out = statistics
    dv = tl.arange(0, BLOCK_DV)
    out_mask = exists[:, None] & (dv < VALUE_DIM)[None, :]
    pointers = out_ptr + place_out[:, None] * VALUE_DIM + dv[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + statistics, lse, mask=exists)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def merge_kernel(
    parts_ptr,
    parts_lse_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    num_parts,
    num_heads,
    num_rows,
    part_size,
    capacity,
    left,
    LEFT: tl.constexpr,
    SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge the parts of one query of one head: weights ``exp(lse - top)``."""
    program = tl.program_id(0).to(tl.int64)
    i = program % num_rows
    h = program // num_rows % num_heads
    n = program // num_rows // num_heads
    length, wrong = _length(lengths_ptr, n, capacity)
    _, first_part, past_parts = _keys_of(length, num_rows, left, part_size, LEFT)
    part = tl.arange(0, BLOCK_P)
    exists = (part >= first_part) & (part < past_parts)
    at = program * num_parts + part
    lse = tl.load(parts_lse_ptr + at, mask=exists, other=float("-inf"))
    top = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + h)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((lse - top) * LOG2E)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2((sink - top) * LOG2E)
    d = tl.arange(0, BLOCK_DV)
    mask = exists[:, None] & (d < VALUE_DIM)[None, :]
    parts = tl.load(parts_ptr + at[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tl.where(wrong, float("nan"), tl.sum(parts * weight[:, None], 0) / divisor)
    place_out = ((n * num_rows + i) * num_heads + h) * VALUE_DIM
    tl.store(out_ptr + place_out + d, out.to(out_ptr.dtype.element_ty), mask=d < VALUE_DIM)
    tl.store(lse_ptr + program, tl.where(total == 0.0, float("-inf"), top + tl.log(divisor)))


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, cache_seqlens, alibi_slopes, sinks, scale, window_left, softcap = args
    query, key, value = map(readable, tensors)
    batch, heads, rows, size = query.shape
    key_heads, capacity, value_size = value.shape[1:]
    out = query.new_empty(batch, rows, heads, value_size)
    lse = query.new_empty(batch, heads, rows, dtype=torch.float32)
    if lse.numel() == 0:
        return out.transpose(1, 2), lse
    group = heads // key_heads
    generation = generation_of(query.device)
    sizes, options = _blocks(query.dtype, group * rows, size, value_size, generation)
    part_size, num_parts = _parts(capacity)
    one_part = num_parts == 1
    parts, parts_lse = out, lse
    if not one_part:
        parts = query.new_empty(batch, heads, rows, num_parts, value_size, dtype=torch.float32)
        parts_lse = query.new_empty(batch, heads, rows, num_parts, dtype=torch.float32)
    num_tiles = triton.cdiv(group * rows, sizes["BLOCK_M"])
    shared: dict[str, Any] = {"num_parts": num_parts, "num_heads": heads, "num_rows": rows}
    shared |= {"part_size": part_size, "capacity": capacity}
    shared |= {"left": min(window_left, capacity), "LEFT": window_left >= 0}
    shared |= {"lengths_ptr": cache_seqlens.contiguous()}
    shared |= {"sinks_ptr": _launch.dense(sinks, query), "SINKS": sinks is not None}
    shared |= {"VALUE_DIM": value_size, "BLOCK_DV": sizes.pop("BLOCK_DV")}
    scores: dict[str, Any] = {"ALIBI": alibi_slopes is not None, "SOFTCAP": softcap > 0.0}
    scores |= {"slopes_ptr": _launch.dense(alibi_slopes, query)}
    scores |= {"stride_slope": heads if has_batch(alibi_slopes) else 0}
    scores["factor"] = scale * LOG2E.value * (2.0 / softcap if softcap > 0.0 else 1.0)
    scores |= {"bound": softcap * LOG2E.value, "PRECISION": _launch.precision(query.dtype)}
    scores |= {"GROUP": group, "HEAD_DIM": size, "WHOLE": one_part, "num_tiles": num_tiles}
    strides = {
        f"stride_{name}{dim}": tensor.stride(axis)
        for name, tensor in (("q", query), ("k", key), ("v", value))
        for axis, dim in enumerate("bhs")
    }
    with _launch.device_of(query):
        pointers = {"q_ptr": query, "k_ptr": key, "v_ptr": value, "out_ptr": parts}
        numbers = strides | scores | shared | sizes | options
        grid = (num_parts * num_tiles * key_heads * batch,)
        parts_kernel[grid](**pointers, lse_ptr=parts_lse, **numbers)
        if not one_part:
            merged = {"parts_ptr": parts, "parts_lse_ptr": parts_lse, "out_ptr": out}
            launch = shared | {"BLOCK_P": triton.next_power_of_2(num_parts)} | _launch.FOUR_WARPS
            merge_kernel[(batch * heads * rows,)](**merged, lse_ptr=lse, **launch)
    return out.transpose(1, 2), lse


def _parts(capacity: int) -> tuple[int, int]:
    """Return the keys of a part and the number of parts of a cache.

    Small parts keep all multiprocessors at work for one sequence; what they cost is their output,
    a few hundredths of the keys and values that they read.
    """
    smallest = 32 if env.triton_interpreted() else _SMALLEST_PART
    part_size = max(smallest, triton.next_power_of_2(triton.cdiv(capacity, _MOST_PARTS)))
    return part_size, max(1, triton.cdiv(capacity, part_size))


def _blocks(
    dtype: torch.dtype, rows: int, head_dim: int, value_dim: int, generation: int
) -> _launch.Tiling:
    """Return block sizes and launch options for tiles of ``rows`` queries on a GPU (80 to 120)."""
    widths = [max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim)]
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_n, stages = 64, 3
    if generation == 120 and block_m == 64:
        block_n = 32  # 64 keys would spill there
    if max(widths) > 128:
        # 32 keys would spill on sm_120 under Triton 3.8 and 3.9.
        block_m, block_n = min(block_m, 32), 16 if generation == 120 else 32
    if dtype == torch.float32:
        block_m, block_n, stages = 16, 32 if max(widths) <= 128 else 16, 2
    sizes = {
        "BLOCK_M": block_m,
        "BLOCK_N": min(block_n, 16) if env.triton_interpreted() else block_n,
    }
    sizes |= {"BLOCK_D": widths[0], "BLOCK_DV": widths[1]}
    return sizes, {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": True}
