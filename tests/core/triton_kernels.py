"""Kernels of the kinds that Triton's tutorials teach, written for the tests of the PTX machine."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_norm(x_ptr, y_ptr, w_ptr, b_ptr, num_cols, eps, BLOCK: tl.constexpr):
    """Norm of a row in three passes over its blocks."""
    row = tl.program_id(0)
    x_ptr += row * num_cols
    y_ptr += row * num_cols
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + col, mask=col < num_cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / num_cols
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + col, mask=col < num_cols, other=0.0).to(tl.float32)
        x = tl.where(col < num_cols, x - mean, 0.0)
        square += x * x
    rstd = 1 / tl.sqrt(tl.sum(square, axis=0) / num_cols + eps)
    for start in range(0, num_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < num_cols
        w = tl.load(w_ptr + col, mask=mask)
        b = tl.load(b_ptr + col, mask=mask)
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + col, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def sum_rows(
    x_ptr,
    sums_ptr,
    lock_ptr,
    num_cols,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Add a row to one of few partial sums, under its lock; the first row finds it unused."""
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < num_cols
    x = tl.load(x_ptr + row * num_cols + col, mask=mask, other=0.0)
    lock = lock_ptr + row % GROUPS
    used = lock + GROUPS
    sums_ptr += row % GROUPS * num_cols + col
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    first = tl.load(used) == 0
    if WAIT:  # until all warps have read it
        tl.debug_barrier()
    if first:
        tl.atomic_xchg(used, 1)
    else:
        x += tl.load(sums_ptr, mask=mask)
    tl.store(sums_ptr, x, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Product of matrices, whose blocks are taken in groups of rows."""
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid, of_group = tl.program_id(0), GROUP * cols
    first = pid // of_group * GROUP
    size = min(rows - first, GROUP)
    row, column = first + pid % of_group % size, pid % of_group // size
    m = (row * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    n = (column * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    k = tl.arange(0, BLOCK_K)
    a_ptr += m[:, None] * stride_a + k[None, :]
    b_ptr += k[:, None] * stride_b + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr, mask=k[None, :] < K - start, other=0.0)
        b = tl.load(b_ptr, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptr += BLOCK_K
        b_ptr += BLOCK_K * stride_b
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + m[:, None] * stride_c + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def matmul_of_descriptors(
    a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The same by tensor descriptors; b is transposed."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc)
    c.store([row, column], acc.to(c.dtype))


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, out_ptr, length, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Causal attention of a head, with a running maximum and sum."""
    head = tl.program_id(1) * length * SIZE
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col, d = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    q = tl.load(
        q_ptr + head + row[:, None] * SIZE + d[None, :], mask=row[:, None] < length, other=0.0
    )
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, SIZE], tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        key = start + col
        at = head + key[:, None] * SIZE + d[None, :]
        k = tl.load(k_ptr + at, mask=key[:, None] < length, other=0.0)
        v = tl.load(v_ptr + at, mask=key[:, None] < length, other=0.0)
        scores = tl.dot(q, k.T) * scale
        seen = (row[:, None] >= key[None, :]) & (key[None, :] < length)
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))
        p = tl.exp(scores - larger[:, None])
        factor = tl.exp(most - larger)
        total = total * factor + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None])
        most = larger
    at = head + row[:, None] * SIZE + d[None, :]
    tl.store(out_ptr + at, (acc / total[:, None]).to(q.dtype), mask=row[:, None] < length)
