"""The gradients of keys and values of attention: a program per block of keys and key head.

It loops over the queries that may attend its keys, of all the query heads that share the key head,
and keeps both gradients in float32 registers: no two programs add to one element. Tiles of scores
are ``[keys, queries]``: left operands of the products without a transposition.
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
    load_twice,
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
def keys_kernel(
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
    dk_ptr,
    dv_ptr,
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
    WANTS_KEY: tl.constexpr,
    WANTS_VALUE: tl.constexpr,
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
    ALLOW_LICM: tl.constexpr,
    TWO_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    start = tl.program_id(0) % num_blocks * BLOCK_N
    head = tl.program_id(0) // num_blocks
    key_heads = num_heads // GROUP
    kh = head % key_heads
    n = head // key_heads
    first_q, rows, first_k, keys, offset = sequence(
        n, num_rows, num_keys, ends_q_ptr, ends_k_ptr, VARLEN
    )
    if VARLEN:  # noqa: SIM102 (this one is known at compile time)
        if start >= keys:
            return
    first_key = first_k + start
    wide_n, wide_kh = n.to(tl.int64), kh.to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    col_read = tl.minimum(col, keys - 1 - start)
    # Keys past the last read as zeros: what becomes of them is not stored.
    k_base = k_ptr + wide_n * stride_kb + wide_kh * stride_kh + first_key * stride_ks
    k = load_tile(k_base, col, stride_ks, keys - start, HEAD_DIM, BLOCK_D, True)
    v_base = v_ptr + wide_n * stride_vb + wide_kh * stride_vh + first_key * stride_vs
    v = load_tile(v_base, col, stride_vs, keys - start, VALUE_DIM, BLOCK_DV, True)
    # Of a key's view: it is attended by the queries from "right" before its place to "left" after.
    low, full_low, full_high, high = span(
        start,
        tl.minimum(start + BLOCK_N, keys) - 1,
        rows,
        -offset,
        right,
        left,
        BLOCK_M,
        RIGHT,
        LEFT,
        False,
    )
    row = tl.arange(0, BLOCK_M)
    place = start + col - offset
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for part in tl.static_range(0 if SPLIT and RIGHT else 1, 3 if SPLIT and LEFT else 2):
        begin, end = stretch(part, low, full_low, full_high, high, SPLIT)
        # One loop over the queries of all heads: with a loop of heads around it, every size spills.
        blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M)
        h = kh * GROUP
        at = tl.cast(begin, tl.int32)
        for _ in tl.range(0, GROUP * blocks, disable_licm=not ALLOW_LICM):
            first = tl.multiple_of(at, BLOCK_M)
            wide_h = h.to(tl.int64)
            if not DESCRIBED:
                q_base = q_ptr + wide_n * stride_qb + wide_h * stride_qh + first_q * stride_qs
                do_base = do_ptr + wide_n * stride_dob + wide_h * stride_doh + first_q * stride_dos
            mask_base = mask_ptr
            if MASK != "none":
                mask_base += wide_n * stride_mb + wide_h * stride_mh
                mask_base += first_q * stride_mm + first_key * stride_mn
            slope = 0.0
            if ALIBI:
                slope = tl.load(slopes_ptr + n * stride_slope + h) * LOG2E
            statistics = statistics_row(n, h, num_heads, num_rows, first_q, VARLEN)
            wide = tl.cast(first, tl.int64)
            left_over = rows - first
            exists = row < left_over
            mask = load_mask(
                mask_base + wide * stride_mm,
                tl.minimum(row, left_over - 1)[None, :],
                col_read[:, None],
                stride_mm,
                stride_mn,
                MASK,
                PER_QUERY,
            )
            if DESCRIBED:
                q = tl.reshape(q_ptr.load([n, h, first, 0]), (BLOCK_M, BLOCK_D))
            else:
                q_tile = q_base + wide * stride_qs
                q = load_tile(q_tile, row, stride_qs, left_over, HEAD_DIM, BLOCK_D, True)
            if CHUNKED:
                s = chunked_product(
                    k_base,
                    col,
                    stride_ks,
                    keys - start,
                    q_tile,
                    row,
                    stride_qs,
                    left_over,
                    HEAD_DIM,
                    BLOCK_D,
                    PRECISION,
                )
            else:
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if SOFTCAP:
                s = without_nan(s)
            distance = place[:, None] - (first + row)[None, :]
            s, tanh = scores(s, distance, mask, slope, factor, bound, SOFTCAP, ALIBI, MASK)
            if TWO_COLUMNS and not PARTS:
                lse = load_twice(lse_ptr + (statistics + first + row), exists)
                lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            else:
                top, lse = load_lse(lse_ptr, parts_ptr, statistics + first, row, exists, PARTS)
            if PARTS:
                s -= top[None, :]
            p = tl.exp2(s - lse[None, :])
            if part != 1 or (not SPLIT and (LEFT or RIGHT)):
                p = tl.where(within(distance, left, right, LEFT, RIGHT), p, 0.0)
            if DESCRIBED:
                do = tl.reshape(do_ptr.load([n, h, first, 0]), (BLOCK_M, BLOCK_DV))
            else:
                do_tile = do_base + wide * stride_dos
                do = load_tile(do_tile, row, stride_dos, left_over, VALUE_DIM, BLOCK_DV, True)
            dropped = p
            if DROPOUT == "all":
                dropped = tl.zeros(p.shape, tl.float32)
            elif DROPOUT != "none":
                drawn = drawn_rows(
                    statistics + first + row,
                    first_q + first + row,
                    exists,
                    n,
                    h,
                    num_keys,
                    seed_ptr,
                    VARLEN,
                    DROPOUT,
                )
                keep = kept_scores(
                    drawn, start, first_k, keys, num_rows, seed_ptr, limit, BLOCK_N, DROPOUT
                )
                keep = tl.trans(keep)
                dropped = tl.where(keep, p, 0.0)
            if WANTS_VALUE:
                dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
            if WANTS_KEY:
                if CHUNKED:
                    dp = chunked_product(
                        v_base,
                        col,
                        stride_vs,
                        keys - start,
                        do_tile,
                        row,
                        stride_dos,
                        left_over,
                        VALUE_DIM,
                        BLOCK_DV,
                        PRECISION,
                    )
                else:
                    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                if DROPOUT == "all":
                    dp = tl.zeros(p.shape, tl.float32)
                elif DROPOUT != "none":
                    dp = tl.where(keep, dp * drop_scale, 0.0)
                if TWO_COLUMNS:
                    delta = load_twice(delta_ptr + (statistics + first + row), exists)
                else:
                    delta = tl.load(delta_ptr + statistics + first + row, mask=exists, other=0.0)
                ds = p * (dp - delta[None, :])
                if ONE_KEY:
                    if PARTS:
                        ds = without_rounding(ds, s - lse[None, :], (lse + top)[None, :])
                    else:
                        ds = without_rounding(ds, s - lse[None, :], lse[None, :])
                if SOFTCAP:
                    ds = ds * (1.0 - tanh * tanh)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
            at += BLOCK_M
            if GROUP > 1:
                past = at >= end
                at = tl.where(past, begin, at)
                h += past.to(tl.int32)
    token = first_key
    if not VARLEN:
        token += wide_n * num_keys
    if WANTS_KEY:
        stride_dk = key_heads * HEAD_DIM
        dk_base = dk_ptr + token * stride_dk + kh * HEAD_DIM
        store_tile(dk_base, col, stride_dk, keys - start, dk * scale, HEAD_DIM, BLOCK_D)
    if WANTS_VALUE:
        stride_dv = key_heads * VALUE_DIM
        dv_base = dv_ptr + token * stride_dv + kh * VALUE_DIM
        if DROPOUT != "none":
            dv = dv * drop_scale
        store_tile(dv_base, col, stride_dv, keys - start, dv, VALUE_DIM, BLOCK_DV)
