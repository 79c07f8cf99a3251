"""Device functions of the attention kernels: where a program works, which keys, which scores.

Names: ``i`` is a query's index in its sequence, ``j`` a key's, ``distance`` is ``j - i - offset``;
``ops/_attention_math.py`` has the formulae. Scores are in units of ``log2``: the softmax then needs
``exp2`` alone. Tiles of scores may lie either way, ``[queries, keys]`` or ``[keys, queries]``: what
depends on a query or a key comes with the dims that it has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.kernels._device import INTERPRETED, LOG2E, kept, kept_at, reciprocal

LEAST: tl.constexpr = tl.constexpr(-2.35e38)  # in units of log2 the least of float32

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence(n, num_rows, num_keys, ends_q_ptr, ends_k_ptr, VARLEN: tl.constexpr):
    """Return first query, queries, first key, keys and offset of sequence ``n``.

    Packed sequences are found in the tables; a dense one begins at 0 of its batch.
    """
    if VARLEN:
        first_q = tl.load(ends_q_ptr + n)
        first_k = tl.load(ends_k_ptr + n)
        rows = (tl.load(ends_q_ptr + n + 1) - first_q).to(tl.int32)
        keys = (tl.load(ends_k_ptr + n + 1) - first_k).to(tl.int32)
        return first_q, rows, first_k, keys, keys - rows
    else:
        nothing = n.to(tl.int64) * 0
        return nothing, num_rows, nothing, num_keys, 0


@triton.jit
def statistics_row(n, h, num_heads, num_rows, first_q, VARLEN: tl.constexpr):
    """Return where the row statistics of a head of a sequence begin: ``[B, H, Sq]``, ``[H, T]``.

    ``num_rows`` is that of all packed sequences together. It is also what dropout counts rows by.
    """
    if VARLEN:
        return h.to(tl.int64) * num_rows + first_q
    else:
        return (n.to(tl.int64) * num_heads + h) * num_rows


@triton.jit
def drawn_rows(
    statistics, token, exists, n, h, num_keys, seed_ptr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr
):
    """Return where dropout counts the scores of rows from; ``_core/philox.py`` has the forms.

    ``statistics`` is the place of a row's statistics, ``token`` that of its query in its sequence,
    or among all packed ones. Modes are those of ``AttentionCall.dropout``.
    """
    if DROPOUT == "tables" or DROPOUT == "draw placed" or DROPOUT == "select placed":
        first = tl.load(seed_ptr + 2) + h.to(tl.int64) * tl.load(seed_ptr + 4)
        if not VARLEN:
            first += n.to(tl.int64) * tl.load(seed_ptr + 3)
        if DROPOUT == "tables":
            return first + tl.load(seed_ptr + 5 + token, mask=exists, other=0)
        else:
            return first + token.to(tl.int64) * num_keys
    else:
        return statistics * num_keys


@triton.jit
def kept_scores(
    drawn,
    first,
    first_k,
    keys,
    num_rows,
    seed_ptr,
    limit,
    BLOCK_N: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Return which scores ``[rows, keys]`` dropout keeps, of ``BLOCK_N`` keys from ``first`` on.

    ``drawn`` is of ``drawn_rows``, ``first_k`` the first of the sequence's ``keys`` keys among all
    packed ones.
    """
    if DROPOUT == "tables":
        column = first + tl.arange(0, BLOCK_N)
        at = tl.load(seed_ptr + 5 + num_rows + first_k + column, mask=column < keys, other=0)
        return kept_at(drawn[:, None] + at[None, :], seed_ptr, limit)
    else:
        return kept(drawn[:, None] + first, seed_ptr, limit, BLOCK_N, DROPOUT)


@triton.jit
def span(
    first,
    last,
    size,
    offset,
    before,
    after,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
):
    """Return ``low <= full_low <= full_high, high``: the other side's indices that are visited.

    For the indices ``first .. last`` of one side (queries) and ``size`` of the other (keys), of
    which ``index + offset - before .. index + offset + after`` may be attended where ``BEFORE`` and
    ``AFTER`` bound it. Blocks in ``full_low .. full_high`` need no look at positions; those from
    ``low`` to ``full_low`` and from ``full_high`` to ``high`` do; all others are excluded. With
    ``WHOLE_BLOCKS`` the full ones do not reach past ``size`` either.
    """
    low = 0
    full_low = 0
    high = size
    full_high = size
    if BEFORE:
        low = tl.maximum(first + offset - before, 0) // BLOCK * BLOCK
        full_low = tl.cdiv(tl.maximum(last + offset - before, 0), BLOCK) * BLOCK
    if AFTER:
        high = tl.minimum(size, last + offset + after + 1)
        full_high = tl.minimum(size, tl.maximum(first + offset + after + 1, 0))
    if AFTER or WHOLE_BLOCKS:
        full_high = full_high // BLOCK * BLOCK
    return low, full_low, tl.maximum(full_high, full_low), high


@triton.jit
def stretch(part: tl.constexpr, low, full_low, full_high, high, SPLIT: tl.constexpr):
    """Return begin and end of a part of a ``span``: 0 is its lower edge, 1 full blocks, 2 the rest.

    Not ``SPLIT``: all of it, whichever part.
    """
    if not SPLIT:
        return low, high
    elif part == 0:
        return low, tl.minimum(full_low, high)
    elif part == 1:
        return full_low, full_high
    else:
        return full_high, high


@triton.jit
def load_tile(
    base, row, stride, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr
):
    """Load rows ``[len(row), BLOCK]`` of ``SIZE`` elements; zeros beyond, and past ``num_rows``.

    ``base`` is a 64-bit pointer to the block, positions inside it are 32-bit.
    """
    d = tl.arange(0, BLOCK)
    pointers = base + row[:, None] * stride + d[None, :]
    if CHECK:
        mask = row[:, None] < num_rows
        if SIZE != BLOCK:
            mask = mask & (d[None, :] < SIZE)
        return tl.load(pointers, mask=mask, other=0.0)
    elif SIZE != BLOCK:
        return tl.load(pointers, mask=(d < SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def chunked_product(
    a_base,
    a_row,
    stride_a,
    num_a,
    b_base,
    b_row,
    stride_b,
    num_b,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``a @ b.T`` of two tiles of rows in memory, a few elements of the rows at a time.

    For float32: products on the ordinary units would hold whole rows in registers.
    """
    CHUNK: tl.constexpr = 64 if BLOCK > 64 else BLOCK
    total = tl.zeros((a_row.shape[0], b_row.shape[0]), tl.float32)
    for first in tl.range(0, BLOCK, CHUNK):
        d = first + tl.arange(0, CHUNK)
        inside = (d < SIZE)[None, :]
        a_mask, b_mask = (a_row < num_a)[:, None] & inside, (b_row < num_b)[:, None] & inside
        a = tl.load(a_base + a_row[:, None] * stride_a + d[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_base + b_row[:, None] * stride_b + d[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@triton.jit
def store_tile(base, row, stride, num_rows, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows ``[len(row), BLOCK]`` of ``SIZE`` elements in the dtype of ``base``."""
    d = tl.arange(0, BLOCK)
    pointers = base + row[:, None] * stride + d[None, :]
    mask = row[:, None] < num_rows
    if SIZE != BLOCK:
        mask = mask & (d[None, :] < SIZE)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_mask(base, i, j, stride_mm, stride_mn, MASK: tl.constexpr, PER_QUERY: tl.constexpr):
    """Load the mask at queries ``i`` and keys ``j`` beside ``base``, which must exist.

    A mask that is the same for all queries is read as one vector, never as a tile. Without mask the
    result means nothing.
    """
    if MASK == "none":
        return 0.0
    else:
        pointers = base + j * stride_mn
        if PER_QUERY:
            pointers = pointers + i * stride_mm
        return tl.load(pointers)


@triton.jit
def scores(
    product,
    distance,
    mask,
    slope,
    factor,
    bound,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return the scores, in units of log2, of products ``query . key``, and softcap's ``tanh``.

    ``factor`` is ``scale * log2(e)``; with softcap ``2 log2(e) scale / softcap``, and ``bound`` is
    ``softcap * log2(e)``.
    """
    tanh = product
    if SOFTCAP:
        tanh = 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(product * factor))
        s = bound * tanh
    else:
        s = product * factor
    if ALIBI:
        s -= slope * tl.abs(distance).to(tl.float32)
    if MASK == "add":
        # Only minus infinity forbids: a finite number stays finite in units of log2.
        mask = mask.to(tl.float32)
        least = tl.maximum(mask, LEAST, propagate_nan=tl.PropagateNan.ALL)
        s += tl.where(mask == float("-inf"), mask, least) * LOG2E
    elif MASK == "bool":
        s = tl.where(mask != 0, s, float("-inf"))
    return s, tanh


@triton.jit
def without_nan(product):
    """Return products with the least number for NaN, for the backward of softcap.

    A query or key that does not count must not give NaN to the derivative of ``tanh``. A row that
    counts with a score of NaN keeps it: its log-sum-exp is NaN. One instruction, no register.
    """
    if INTERPRETED:  # whose maximum of NaN is NaN
        return tl.where(product == product, product, -3.0e38)
    else:
        return tl.maximum(product, -3.0e38)


@triton.jit
def within(distance, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Return where the window allows a distance."""
    if LEFT and RIGHT:
        return (distance >= -left) & (distance <= right)
    elif LEFT:
        return distance >= -left
    else:
        return distance <= right


@triton.jit
def load_lse(lse_ptr, parts_ptr, first, row, mask, PARTS: tl.constexpr):
    """Load log-sum-exp in units of log2; rows that attend nothing get infinity: weights of 0.

    ``first`` is a 64-bit position, rows count from it.

    With ``PARTS``, its two parts: what is to be subtracted from a score first, and second.
    """
    if PARTS:
        parts_ptr += 2 * first
        top = tl.load(parts_ptr + 2 * row, mask=mask, other=float("-inf"))
        rest = tl.load(parts_ptr + 2 * row + 1, mask=mask, other=0.0)
        # Not a row with a score of NaN, whose maximum may not show it: its weights are NaN.
        nothing = (top == float("-inf")) & (rest == rest)
        return tl.where(nothing, 0.0, top), tl.where(nothing, float("inf"), rest)
    else:
        lse = tl.load(lse_ptr + (first + row), mask=mask, other=float("-inf"))
        return 0.0, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def load_twice(pointers, exists):
    """Load a number for each row, 0 for those that do not exist, as a tile of two equal columns.

    Fewer elements than threads Triton 3.6 loads where the scores need them: many times each.
    """
    tile = tl.load(pointers[None, :] + tl.zeros((2, 1), tl.int32), mask=exists[None, :], other=0.0)
    loaded, _ = tl.split(tl.trans(tile))
    return loaded


@triton.jit
def without_rounding(ds, exponent, lse):
    """Return the gradients of scores that are alone in their rows: 0, and no rounding of delta's.

    The softmax of one score is constant. A score whose weight, ``2 ** exponent``, is less than 1 is
    not alone: its log-sum-exp is one of more keys than there are here. NaN stays NaN.
    """
    alone = exponent >= -0.00004 * (1.0 + tl.abs(lse))
    return tl.where(alone, ds * 0.0, ds)
