"""The forward kernel of attention, of dense batches and of packed sequences, and its launch.

A program holds a block of queries of one head, walks the blocks of keys that it may attend, and
keeps the running maximum and sum of each row (online softmax). Memory traffic: query and output
once, keys and values once per block of queries, mostly from the L2 cache. Blocks that window and
causality exclude are not visited; those that they do not touch run a loop without any look at
positions. Options are compile-time flags: the plain case contains no code of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._attention_device import (
    LN2,
    LOG2E,
    chunked_product,
    drawn_rows,
    kept_scores,
    load_mask,
    load_tile,
    scores,
    sequence,
    span,
    statistics_row,
    store_tile,
    stretch,
    within,
)
from fusedops.kernels._attention_launch import NOT_SPECIALIZED, AttentionCall, blocks
from fusedops.kernels._device import split


@triton.jit
def _store_part(
    base, row, stride, num_rows, tile, SIZE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """Store a part, ``BLOCK`` columns, of a tile of ``SIZE`` columns that was split."""
    FIRST: tl.constexpr = PART * BLOCK
    store_tile(base + FIRST, row, stride, num_rows, tile, SIZE - FIRST, BLOCK)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    slopes_ptr,
    sinks_ptr,
    seed_ptr,
    ends_q_ptr,
    ends_k_ptr,
    out_ptr,
    rest_ptr,
    lse_ptr,
    parts_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_slope,
    num_blocks,
    num_heads,
    num_rows,
    num_keys,
    factor,
    bound,
    left,
    right,
    limit,
    drop_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    PER_QUERY: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    KEEPS: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FOLD: tl.constexpr,
    DROPOUT: tl.constexpr,
    VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    MASK_DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    h = head % num_heads
    n = head // num_heads
    if RIGHT:
        block = (
            num_blocks - 1 - block
        )  # the longest rows first: short ones fill the gaps at the end
    start = block * BLOCK_M
    first_q, rows, first_k, keys, offset = sequence(
        n, num_rows, num_keys, ends_q_ptr, ends_k_ptr, VARLEN
    )
    if VARLEN:  # noqa: SIM102 (this one is known at compile time)
        if start >= rows:
            return
    first_row = first_q + start
    row = tl.arange(0, BLOCK_M)
    row_read = tl.minimum(row, rows - 1 - start)
    place = start + row + offset
    wide_n, wide_h, wide_kh = n.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    q_base = q_ptr + wide_n * stride_qb + wide_h * stride_qh + first_row * stride_qs
    if not DESCRIBED:
        k_base = k_ptr + wide_n * stride_kb + wide_kh * stride_kh + first_k * stride_ks
        v_base = v_ptr + wide_n * stride_vb + wide_kh * stride_vh + first_k * stride_vs
    mask_base = mask_ptr
    if MASK != "none" and not MASK_DESCRIBED:
        mask_base += wide_n * stride_mb + wide_h * stride_mh + first_row * stride_mm
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + n * stride_slope + h) * LOG2E
    statistics = statistics_row(n, h, num_heads, num_rows, first_q, VARLEN) + start
    drawn = drawn_rows(
        statistics + row,
        first_row + row,
        row < rows - start,
        n,
        h,
        num_keys,
        seed_ptr,
        VARLEN,
        DROPOUT,
    )
    unit = factor
    if FOLD:
        unit = 1.0
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        # As if each row had seen one key of this score already, whose value is zero.
        sink = tl.load(sinks_ptr + h) * LOG2E
        top = tl.zeros((BLOCK_M,), tl.float32) + sink
        total += tl.where(sink == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    low, full_low, full_high, high = span(
        start,
        tl.minimum(start + BLOCK_M, rows) - 1,
        keys,
        offset,
        left,
        right,
        BLOCK_N,
        LEFT,
        RIGHT,
        True,
    )
    q = load_tile(q_base, row, stride_qs, rows - start, HEAD_DIM, BLOCK_D, True)
    col = tl.arange(0, BLOCK_N)
    FEW_REGISTERS: tl.constexpr = DESCRIBED and BLOCK_DV == 128 and FOLD and DROPOUT == "none"
    for part in tl.static_range((0 if LEFT else 1) if SPLIT else 2, 3):
        # Keys at the left edge of the window, keys that all queries attend, keys at the right edge;
        # not ``SPLIT``: all keys as at an edge.
        begin, end = stretch(part, low, full_low, full_high, high, SPLIT)
        # FEW_REGISTERS: each step recomputes the addresses of a tile in shared memory. Moved out of
        # the loop they would take registers that two blocks of 128 queries do not leave.
        for first in tl.range(begin, end, BLOCK_N, disable_licm=FEW_REGISTERS):
            first = tl.multiple_of(first, BLOCK_N)
            wide = tl.cast(first, tl.int64)
            left_over = keys - first
            # The mask first: its load has the time of a product to arrive.
            if MASK_DESCRIBED:
                mask = mask_ptr.load([n * stride_mb, h * stride_mh, start, first])
                mask = tl.reshape(mask, (BLOCK_M, BLOCK_N))
            else:
                mask = load_mask(
                    mask_base + wide * stride_mn,
                    row_read[:, None],
                    tl.minimum(col, left_over - 1)[None, :] if part != 1 else col[None, :],
                    stride_mm,
                    stride_mn,
                    MASK,
                    PER_QUERY,
                )
            if DESCRIBED:
                k = tl.reshape(k_ptr.load([n, h // GROUP, first, 0]), (BLOCK_N, BLOCK_D))
            else:
                k_tile = k_base + wide * stride_ks
                k = load_tile(k_tile, col, stride_ks, left_over, HEAD_DIM, BLOCK_D, part != 1)
            if CHUNKED:
                s = chunked_product(
                    q_base,
                    row,
                    stride_qs,
                    rows - start,
                    k_tile,
                    col,
                    stride_ks,
                    left_over,
                    HEAD_DIM,
                    BLOCK_D,
                    PRECISION,
                )
            else:
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            distance = (first + col)[None, :] - place[:, None]
            s, _ = scores(s, distance, mask, slope, unit, bound, SOFTCAP, ALIBI, MASK)
            if part != 1:
                allowed = (col < left_over)[None, :]
                if LEFT or RIGHT:
                    allowed = allowed & within(distance, left, right, LEFT, RIGHT)
                s = tl.where(allowed, s, float("-inf"))
            # The scale of plain scores joins the subtraction of the maximum: a multiply-add each.
            highest = tl.max(s, 1)
            if FOLD:
                highest = highest * factor
                s = s * factor
            new_top = tl.maximum(top, highest)
            shift = new_top
            if part != 1 or MASK != "none":
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s - shift[:, None])
            alpha = tl.exp2(top - shift)
            total = total * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            top = new_top
            if DROPOUT == "all":
                p = tl.zeros(p.shape, tl.float32)
            elif DROPOUT != "none":
                keep = kept_scores(
                    drawn, first, first_k, keys, num_rows, seed_ptr, limit, BLOCK_N, DROPOUT
                )
                p = tl.where(keep, p, 0.0)
            if DESCRIBED:
                v = tl.reshape(v_ptr.load([n, h // GROUP, first, 0]), (BLOCK_N, BLOCK_DV))
            else:
                v_tile = v_base + wide * stride_vs
                v = load_tile(v_tile, col, stride_vs, left_over, VALUE_DIM, BLOCK_DV, part != 1)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    divisor = tl.where(total == 0.0, 1.0, total)
    scale = 1.0 / divisor
    if DROPOUT != "none":
        scale = scale * drop_scale
    token = first_row
    if not VARLEN:
        token += wide_n * num_rows
    stride_os = num_heads * VALUE_DIM
    out_base = out_ptr + token * stride_os + h * VALUE_DIM
    rest_base = rest_ptr + token * stride_os + h * VALUE_DIM
    # Wide heads are finished in parts: all at once would not leave registers for what is left.
    PARTS_D: tl.constexpr = 4 if BLOCK_DV > 128 or FEW_REGISTERS else 1
    PART: tl.constexpr = BLOCK_DV // PARTS_D
    parts_d = split(acc, BLOCK_M, BLOCK_DV, PARTS_D)
    for part in tl.static_range(PARTS_D):
        out = parts_d[part] * scale[:, None]
        _store_part(out_base, row, stride_os, rows - start, out, VALUE_DIM, part, PART)
        if KEEPS:
            # What the rounding takes, for the backward's sum of output * grad_output.
            rest = out - out.to(out_ptr.dtype.element_ty).to(tl.float32)
            _store_part(rest_base, row, stride_os, rows - start, rest, VALUE_DIM, part, PART)
    lse = tl.where(total == 0.0, float("-inf"), top * LN2 + tl.log(divisor))
    tl.store(lse_ptr + statistics + row, lse, mask=row < rows - start)
    if PARTS:
        parts = parts_ptr + 2 * (statistics + row)
        tl.store(parts, top, mask=row < rows - start)
        tl.store(parts + 1, tl.log2(divisor), mask=row < rows - start)


def forward(call: AttentionCall, keep_remainder: bool) -> tuple[torch.Tensor, ...]:
    """Launch the forward.

    Returns output ``[B, H, Sq, Dv]`` (heads inside), log-sum-exp, what the output's rounding took,
    laid out as the output, and the log-sum-exp's parts (both empty unless they are to be kept).
    """
    query, value = call.query, call.value
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[3])
    lse = query.new_empty(batch, heads, rows, dtype=torch.float32)
    keeps = keep_remainder and query.dtype != torch.float32
    rest = torch.empty_like(out) if keeps else query.new_empty(0)
    keeps_parts = keep_remainder and (call.additive or query.dtype == torch.float32)
    parts = lse.new_empty((*lse.shape, 2) if keeps_parts else (0,))
    arguments, sizes, options = blocks("forward", call, call.arguments())
    num_blocks = triton.cdiv(call.max_rows, sizes["BLOCK_M"])
    programs = num_blocks * heads * call.sequences
    targets = {"out_ptr": out, "rest_ptr": rest if keeps else out, "lse_ptr": lse}
    targets["parts_ptr"] = parts if keeps_parts else lse
    flags = {"SINKS": call.sinks is not None, "KEEPS": keeps, "PARTS": keeps_parts}
    flags["FOLD"] = call.folds
    if programs:
        arguments |= {"sinks_ptr": _launch.dense(call.sinks, query), "num_blocks": num_blocks}
        with _launch.device_of(query):
            forward_kernel[(programs,)](**arguments, **targets, **flags, **sizes, **options)
    return out.transpose(1, 2), lse, rest.transpose(1, 2) if keeps else rest, parts
