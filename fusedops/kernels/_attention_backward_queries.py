"""The gradients of queries and of scores of attention: a program per block of queries and head.

It walks the keys that its queries may attend, as the forward does, and keeps the gradient of its
queries in float32 registers. The gradient of the scores is written only where an additive mask
requires it.

``delta``, the mean of a row's gradients under its weights, comes from the output, which was rounded
to half precision. Float32 gradients need it unrounded, as ``sum(p * dp)``. ``DELTA`` says how:
``"given"`` reads the rounded one; ``"beside"`` sums it in the same loop, for the gradient of sinks;
``"first"`` loops over the keys twice, for the gradient of a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.kernels._attention_device import (
    LOG2E,
    chunked_product,
    drawn_rows,
    kept_scores,
    load_lse,
    load_mask,
    load_tile,
    scores,
    sequence,
    span,
    statistics_row,
    store_tile,
    stretch,
    within,
    without_nan,
    without_rounding,
)
from fusedops.kernels._attention_launch import NOT_SPECIALIZED


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    slopes_ptr,
    seed_ptr,
    ends_q_ptr,
    ends_k_ptr,
    do_ptr,
    lse_ptr,
    parts_ptr,
    delta_ptr,
    exact_ptr,
    dq_ptr,
    ds_ptr,
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
    stride_dob,
    stride_doh,
    stride_dos,
    num_blocks,
    num_heads,
    num_rows,
    num_keys,
    factor,
    bound,
    scale,
    left,
    right,
    limit,
    drop_scale,
    WANTS_QUERY: tl.constexpr,
    WANTS_SCORES: tl.constexpr,
    DELTA: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    PER_QUERY: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PARTS: tl.constexpr,
    ONE_KEY: tl.constexpr,
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
        block = num_blocks - 1 - block
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
    wide_n, wide_h, wide_kh = n.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    q_base = q_ptr + wide_n * stride_qb + wide_h * stride_qh + first_row * stride_qs
    if not DESCRIBED:
        k_base = k_ptr + wide_n * stride_kb + wide_kh * stride_kh + first_k * stride_ks
        v_base = v_ptr + wide_n * stride_vb + wide_kh * stride_vh + first_k * stride_vs
    do_base = do_ptr + wide_n * stride_dob + wide_h * stride_doh + first_row * stride_dos
    mask_base = mask_ptr
    if MASK != "none" and not MASK_DESCRIBED:
        mask_base += wide_n * stride_mb + wide_h * stride_mh + first_row * stride_mm
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + n * stride_slope + h) * LOG2E
    statistics = statistics_row(n, h, num_heads, num_rows, first_q, VARLEN) + start
    exists = row < rows - start
    ds_base = ds_ptr + statistics * num_keys
    top, lse = load_lse(lse_ptr, parts_ptr, statistics, row, exists, PARTS)
    if DELTA != "given":
        exact = tl.load(exact_ptr + statistics + row, mask=exists, other=0.0)
    if DELTA != "first":
        delta = tl.load(delta_ptr + statistics + row, mask=exists, other=0.0)
    q = load_tile(q_base, row, stride_qs, rows - start, HEAD_DIM, BLOCK_D, True)
    do = load_tile(do_base, row, stride_dos, rows - start, VALUE_DIM, BLOCK_DV, True)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
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
    col = tl.arange(0, BLOCK_N)
    place = start + row + offset
    drawn = drawn_rows(
        statistics + row, first_row + row, exists, n, h, num_keys, seed_ptr, VARLEN, DROPOUT
    )
    for walk in tl.static_range(0 if DELTA == "first" else 1, 2):
        for part in tl.static_range((0 if LEFT else 1) if SPLIT else 2, 3):
            begin, end = stretch(part, low, full_low, full_high, high, SPLIT)
            for first in tl.range(begin, end, BLOCK_N):
                first = tl.multiple_of(first, BLOCK_N)
                wide = tl.cast(first, tl.int64)
                left_over = keys - first
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
                if SOFTCAP:
                    s = without_nan(s)
                distance = (first + col)[None, :] - place[:, None]
                s, tanh = scores(s, distance, mask, slope, factor, bound, SOFTCAP, ALIBI, MASK)
                if PARTS:
                    s -= top[:, None]
                p = tl.exp2(s - lse[:, None])
                if part != 1:
                    allowed = (col < left_over)[None, :]
                    if LEFT or RIGHT:
                        allowed = allowed & within(distance, left, right, LEFT, RIGHT)
                    p = tl.where(allowed, p, 0.0)
                if DESCRIBED:
                    v = tl.reshape(v_ptr.load([n, h // GROUP, first, 0]), (BLOCK_N, BLOCK_DV))
                else:
                    v_tile = v_base + wide * stride_vs
                    v = load_tile(v_tile, col, stride_vs, left_over, VALUE_DIM, BLOCK_DV, part != 1)
                if CHUNKED:
                    dp = chunked_product(
                        do_base,
                        row,
                        stride_dos,
                        rows - start,
                        v_tile,
                        col,
                        stride_vs,
                        left_over,
                        VALUE_DIM,
                        BLOCK_DV,
                        PRECISION,
                    )
                else:
                    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                if DROPOUT == "all":
                    dp = tl.zeros(p.shape, tl.float32)
                elif DROPOUT != "none":
                    keep = kept_scores(
                        drawn, first, first_k, keys, num_rows, seed_ptr, limit, BLOCK_N, DROPOUT
                    )
                    dp = tl.where(keep, dp * drop_scale, 0.0)
                if walk == 0 or DELTA == "beside":
                    exact += tl.sum(p * dp, 1)
                if walk == 1:
                    ds = p * (dp - delta[:, None])
                    if ONE_KEY:
                        ds = without_rounding(ds, s - lse[:, None], (lse + top)[:, None])
                if walk == 1 and WANTS_SCORES:
                    store = exists[:, None]
                    if part != 1:
                        store = store & (col < left_over)[None, :]
                    ds_tile = ds_base + wide + row[:, None] * num_keys + col[None, :]
                    tl.store(ds_tile, ds.to(ds_ptr.dtype.element_ty), mask=store)
                if walk == 1 and WANTS_QUERY:
                    if SOFTCAP:
                        ds = ds * (1.0 - tanh * tanh)
                    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if walk == 0:
            delta = exact
    if DELTA != "given":
        tl.store(exact_ptr + statistics + row, exact, mask=exists)
    if WANTS_QUERY:
        token = first_row
        if not VARLEN:
            token += wide_n * num_rows
        stride_dq = num_heads * HEAD_DIM
        dq_base = dq_ptr + token * stride_dq + h * HEAD_DIM
        store_tile(dq_base, row, stride_dq, rows - start, dq * scale, HEAD_DIM, BLOCK_D)
