"""Kernels of the gated delta rule for all chunks at once: ``gated_delta_rule.py`` has the rest."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.kernels._device import exp

# Numbers that a kernel need not know: another call then needs no new compilation.
NOT_SPECIALIZED = ("tokens", "heads", "parts")

CHUNK = tl.constexpr(16)


@triton.jit
def place(ends_ptr, tokens, heads, parts, PACKED: tl.constexpr):
    """Return part, head and sequence of a program, and where the sequence lies.

    That is its entry of the batch, its first token there and over the batch, its tokens, and the
    number of its first chunk over the batch.
    """
    program = tl.program_id(0)
    part = program % parts
    head = program // parts % heads
    n = (program // parts // heads).to(tl.int64)
    if PACKED:
        first = tl.load(ends_ptr + n)
        count = (tl.load(ends_ptr + n + 1) - first).to(tl.int32)
        return part, head, n, n * 0, first, first, count, first // CHUNK + n
    else:
        return part, head, n, n, n * 0, n * tokens, tokens, n * tl.cdiv(tokens, CHUNK)


@triton.jit
def load_rows(base, row, stride, exists, column, width):
    """Return rows of a tensor in float32, zeros where there is none."""
    mask = exists[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(base + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, row, stride, exists, column, width, values):
    mask = exists[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(base + at, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _normalised(x, NORM: tl.constexpr):
    if NORM:
        return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    else:
        return x


@triton.jit
def _rows(
    q_base,
    k_base,
    gate_base,
    beta_base,
    start,
    count,
    stride_q,
    stride_k,
    heads,
    scale,
    HEAD_DIM: tl.constexpr,
    GATES: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Return query, key, beta as a column, gates and the sums of later gates of a chunk.

    Of gates there are ``GATES``, 1 or one for each channel. Decays are exponentials of sums of the
    gates between two tokens, never of differences, which lose their bits after a strong gate.
    """
    row = start + tl.arange(0, CHUNK)
    exists = row < count
    column = tl.arange(0, BLOCK_K)
    query = load_rows(q_base, row, stride_q, exists, column, HEAD_DIM)
    key = load_rows(k_base, row, stride_k, exists, column, HEAD_DIM)
    beta = tl.load(beta_base + row.to(tl.int64) * heads, mask=exists, other=0.0)[:, None]
    g = tl.arange(0, BLOCK_G)
    gate = load_rows(gate_base, row, heads * GATES, exists, g, GATES)
    follows = (row + 1 < count) & (row + 1 < start + CHUNK)
    after = load_rows(gate_base, row + 1, heads * GATES, follows, g, GATES)
    after = tl.cumsum(after, 0, reverse=True)
    query = _normalised(query, NORM) * scale
    return query, _normalised(key, NORM), beta, gate, after


@triton.jit
def _column(matrix, i, j):
    """Return column ``j`` of a matrix over tokens, as a column."""
    return tl.sum(tl.where(i[None, :] == j, matrix, 0.0), 1, keep_dims=True)


@triton.jit
def _since(gate, i):
    """Return the decays from token to token with one gate, 0 to earlier ones."""
    total = tl.cumsum(tl.where(i[:, None] > i[None, :], gate, 0.0), 0)
    return exp(tl.where(i[:, None] >= i[None, :], total, float("-inf")))


@triton.jit
def _decayed_key(key, gate, since, i, j):
    """Return the sums of gates since token ``j``, the decays from it, and its key times these.

    ``since`` are the sums since token ``j + 1``. Decays to earlier tokens are 0.
    """
    added = tl.sum(tl.where(i[:, None] == j + 1, gate, 0.0), 0, keep_dims=True)
    since = tl.where(i[:, None] > j, since + added, 0.0)
    decay = exp(tl.where(i[:, None] >= j, since, float("-inf")))
    return since, decay, tl.sum(tl.where(i[:, None] == j, key, 0.0), 0, keep_dims=True) * decay


@triton.jit
def _stack(upper, lower):
    """Return one matrix of the rows of both, so that a product fills all warps."""
    both = tl.permute(tl.join(upper, lower), (2, 0, 1))
    return tl.reshape(both, (2 * upper.shape[0], upper.shape[1]))


@triton.jit
def _unstack(both):
    """Return the upper and the lower half of the rows."""
    halves = tl.reshape(both, (2, both.shape[0] // 2, both.shape[1]))
    return tl.split(tl.permute(halves, (1, 2, 0)))


@triton.jit
def square(number, heads, head):
    """Return where the elements of a chunk's matrix over tokens lie."""
    i = tl.arange(0, CHUNK)
    return ((number * heads + head) * CHUNK + i[:, None]) * CHUNK + i[None, :]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def prepare_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    ends_ptr,
    keys_ptr,
    scores_ptr,
    inverse_ptr,
    read_keys_ptr,
    read_queries_ptr,
    written_ptr,
    decay_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    tokens,
    heads,
    parts,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GATES: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write what walks read of the chunks.

    The products of keys and of queries with keys, ``(1 + A)^-1``, keys and queries times exp(G),
    keys times exp(G[last] - G), and exp(G[last]).
    """
    part, head, n, batch, token, first, count, number = place(
        ends_ptr, tokens, heads, parts, PACKED
    )
    wide_head, key_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
    q_base = q_ptr + batch * stride_qb + token * stride_qt + key_head * stride_qh
    k_base = k_ptr + batch * stride_kb + token * stride_kt + key_head * stride_kh
    of_head = first * heads + wide_head
    i = tl.arange(0, CHUNK)
    for start in tl.range(part * CHUNK, count, parts * CHUNK):
        query, key, beta, gate, after = _rows(
            q_base,
            k_base,
            gate_ptr + of_head * GATES,
            beta_ptr + of_head,
            start,
            count,
            stride_qt,
            stride_kt,
            heads,
            scale,
            HEAD_DIM,
            GATES,
            NORM,
            BLOCK_K,
            BLOCK_G,
        )
        if BLOCK_G == 1:
            decay = _since(gate, i)
            both = tl.dot(_stack(key, query), tl.trans(key), input_precision=PRECISION)
            keys, scores = _unstack(both)
            keys, scores = keys * decay, scores * decay
        else:
            keys = tl.zeros((CHUNK, CHUNK), tl.float32)
            scores = tl.zeros((CHUNK, CHUNK), tl.float32)
            since = tl.zeros_like(gate)
            for step in tl.range(0, CHUNK):
                j = CHUNK - 1 - step
                since, decay, decayed = _decayed_key(key, gate, since, i, j)
                here = i[None, :] == j
                keys = tl.where(here, tl.sum(key * decayed, 1, keep_dims=True), keys)
                scores = tl.where(here, tl.sum(query * decayed, 1, keep_dims=True), scores)
        keys = tl.where(i[:, None] > i[None, :], keys, 0.0)
        scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
        # By substitution: products of powers of A lose four digits where keys are equal.
        by_columns = tl.trans(keys * beta)
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for later in tl.range(1, CHUNK):
            known = tl.sum(_column(by_columns, i, later) * inverse, 0, keep_dims=True)
            inverse = tl.where(i[:, None] == later, inverse - known, inverse)
        at = square(number + start // CHUNK, heads, wide_head)
        tl.store(keys_ptr + at, keys)
        tl.store(scores_ptr + at, scores)
        tl.store(inverse_ptr + at, inverse)
        row = start + i
        exists = row < count
        k = tl.arange(0, BLOCK_K)
        at, stride = of_head * HEAD_DIM, heads * HEAD_DIM
        rise = exp(tl.cumsum(gate, 0))
        store_rows(read_keys_ptr + at, row, stride, exists, k, HEAD_DIM, key * rise)
        store_rows(read_queries_ptr + at, row, stride, exists, k, HEAD_DIM, query * rise)
        written = key * exp(after)
        store_rows(written_ptr + at, row, stride, exists, k, HEAD_DIM, written)
        g = tl.arange(0, BLOCK_G)
        at = ((number + start // CHUNK) * heads + wide_head) * GATES
        tl.store(decay_ptr + at + g, exp(tl.sum(gate, 0)), mask=g < GATES)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def gradients_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    ends_ptr,
    keys_ptr,
    scores_ptr,
    states_ptr,
    grad_states_ptr,
    rest_ptr,
    new_ptr,
    solved_ptr,
    grad_ptr,
    dq_ptr,
    dk_ptr,
    dgate_ptr,
    dbeta_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    tokens,
    heads,
    parts,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GATES: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write the gradients of the head's queries and keys, of gates and of beta."""
    # With a gate per channel there are more warps than matrix instructions of this product.
    SQUARES: tl.constexpr = PRECISION if BLOCK_G == 1 else "ieee"
    part, head, n, batch, token, first, count, number = place(
        ends_ptr, tokens, heads, parts, PACKED
    )
    k = tl.arange(0, BLOCK_K)
    wide_head, key_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
    q_base = q_ptr + batch * stride_qb + token * stride_qt + key_head * stride_qh
    k_base = k_ptr + batch * stride_kb + token * stride_kt + key_head * stride_kh
    of_head = first * heads + wide_head
    i = tl.arange(0, CHUNK)
    not_later = i[:, None] >= i[None, :]
    earlier = i[:, None] > i[None, :]
    stride = heads * VALUE_DIM
    for start in tl.range(part * CHUNK, count, parts * CHUNK):
        row = start + i
        exists = row < count
        chunk = number + start // CHUNK
        # Of the scores and queries, then of the products of keys and of keys as rows.
        squares = tl.zeros((CHUNK, 2 * CHUNK), tl.float32)
        rows = tl.zeros((2 * CHUNK, BLOCK_K), tl.float32)
        columns = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        grad_beta = tl.zeros((CHUNK,), tl.float32)
        of_states = tl.zeros((BLOCK_K,), tl.float32)
        for column in tl.range(0, VALUE_DIM, BLOCK_V):
            v = column + tl.arange(0, BLOCK_V)
            at = of_head * VALUE_DIM
            grad = load_rows(grad_ptr + at, row, stride, exists, v, VALUE_DIM)
            new = load_rows(new_ptr + at, row, stride, exists, v, VALUE_DIM)
            solved = load_rows(solved_ptr + at, row, stride, exists, v, VALUE_DIM)
            rest = load_rows(rest_ptr + at, row, stride, exists, v, VALUE_DIM)
            grad_beta += tl.sum(solved * rest, 1)
            both = _stack(grad, -solved)
            squares = tl.dot(new, tl.trans(both), squares, input_precision=SQUARES)
            in_state = (k < HEAD_DIM)[None, :] & (v < VALUE_DIM)[:, None]
            at = (chunk * heads + wide_head) * HEAD_DIM * VALUE_DIM
            at = at + k[None, :] * VALUE_DIM + v[:, None]
            by_state = tl.load(states_ptr + at, mask=in_state, other=0.0)
            by_grad = tl.load(grad_states_ptr + at, mask=in_state, other=0.0)
            of_states += tl.sum(by_state * by_grad, 0)
            rows = tl.dot(both, by_state, rows, input_precision=PRECISION)
            columns = tl.dot(new, by_grad, columns, input_precision=PRECISION)
        query, key, beta, gate, after = _rows(
            q_base,
            k_base,
            gate_ptr + of_head * GATES,
            beta_ptr + of_head,
            start,
            count,
            stride_qt,
            stride_kt,
            heads,
            scale,
            HEAD_DIM,
            GATES,
            NORM,
            BLOCK_K,
            BLOCK_G,
        )
        matrix = square(chunk, heads, wide_head)
        scores = tl.load(scores_ptr + matrix)
        keys = tl.load(keys_ptr + matrix)
        of_scores, of_keys = _unstack(tl.trans(squares))
        of_scores = tl.where(not_later, of_scores, 0.0)
        of_keys = tl.where(earlier, of_keys, 0.0)
        grad_query, key_rows = _unstack(rows)
        grad_beta += tl.sum(of_keys * keys, 1)
        of_keys = of_keys * beta
        # The key as a row has the factor exp(G), as a column exp(-G).
        rise = exp(tl.cumsum(gate, 0))
        grad_query = grad_query * rise
        key_rows = key_rows * (beta * rise)
        columns = columns * exp(after)
        of_rows = tl.cumsum(query * grad_query + key * key_rows, 0, reverse=True)
        before = tl.where(earlier, 1.0, 0.0)
        grad_gate = of_rows + (of_states * exp(tl.sum(gate, 0)))[None, :]
        grad_gate += tl.dot(before, key * columns, input_precision="ieee")
        grad_key = key_rows + columns
        # A gate decays what crosses its token: _delta_math._gate_gradient.
        if BLOCK_G == 1:
            crossing = tl.cumsum(of_scores * scores + of_keys * keys, 0, reverse=True)
            crossing = tl.sum(tl.where(earlier, crossing, 0.0), 1, keep_dims=True)
            grad_gate = tl.sum(grad_gate, 1, keep_dims=True) + crossing
            decay = _since(gate, i)
            of_scores = of_scores * decay
            of_keys = of_keys * decay
            grad_query = tl.dot(of_scores, key, grad_query, input_precision=PRECISION)
            grad_key = tl.dot(of_keys, key, grad_key, input_precision=PRECISION)
            grad_key = tl.dot(tl.trans(of_keys), key, grad_key, input_precision=PRECISION)
            grad_key = tl.dot(tl.trans(of_scores), query, grad_key, input_precision=PRECISION)
        else:
            since = tl.zeros_like(gate)
            for step in tl.range(0, CHUNK):
                j = CHUNK - 1 - step
                since, decay, decayed = _decayed_key(key, gate, since, i, j)
                of_score, of_key = _column(of_scores, i, j), _column(of_keys, i, j)
                grad_query += of_score * decayed
                grad_key += of_key * decayed
                row_terms = of_score * query + of_key * key
                of_column = tl.sum(row_terms * decay, 0, keep_dims=True)
                grad_key += tl.where(i[:, None] == j, of_column, 0.0)
                crossing = tl.cumsum(row_terms * decayed, 0, reverse=True)
                grad_gate += tl.where(i[:, None] > j, crossing, 0.0)
        at = of_head * HEAD_DIM
        store_rows(dq_ptr + at, row, heads * HEAD_DIM, exists, k, HEAD_DIM, grad_query * scale)
        store_rows(dk_ptr + at, row, heads * HEAD_DIM, exists, k, HEAD_DIM, grad_key)
        g = tl.arange(0, BLOCK_G)
        at = of_head * GATES
        store_rows(dgate_ptr + at, row, heads * GATES, exists, g, GATES, grad_gate)
        tl.store(dbeta_ptr + of_head + row.to(tl.int64) * heads, grad_beta, mask=exists)
