"""rotary_embedding in Triton: one kernel for forward and backward, launchers.

A program rotates a block of heads of query or of key at one position: cos and sin are loaded once
for all of them. Traffic: query and key once in, once out, each by its own strides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch

# Pairs of a program at most: in half precision a thread has one 16-byte access to each of the pair.
_PAIRS = 512
_OPTIONS = {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True}


@triton.jit
def _rotate(low, high, cos_low, cos_high, sin_low, sin_high, INVERSE: tl.constexpr):
    """Return the rotated pairs; ``INVERSE`` is the transposed map."""
    if INVERSE:
        return low * cos_low + high * sin_high, high * cos_high - low * sin_low
    else:
        return low * cos_low - high * sin_low, high * cos_high + low * sin_high


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    stride_xh,
    stride_yh,
    cos_ptr,
    sin_ptr,
    first,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    head = first + tl.arange(0, BLOCK_H)
    here = (head < num_heads)[:, None]
    x_head = x_ptr + head[:, None].to(tl.int64) * stride_xh
    y_head = y_ptr + head[:, None].to(tl.int64) * stride_yh
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK_R)
        inside = col < ROTARY_DIM
        mask = here & inside[None, :]
        cos = tl.load(cos_ptr + col, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + col, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_head + col[None, :], mask=mask, other=0.0).to(tl.float32)
        cos_low, cos_high = tl.split(tl.reshape(cos, (1, BLOCK_R, 2)))
        sin_low, sin_high = tl.split(tl.reshape(sin, (1, BLOCK_R, 2)))
        low, high = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_R, 2)))
        low, high = _rotate(low, high, cos_low, cos_high, sin_low, sin_high, INVERSE)
        y = tl.reshape(tl.join(low, high), (BLOCK_H, 2 * BLOCK_R))
        tl.store(y_head + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        half: tl.constexpr = ROTARY_DIM // 2
        col = tl.arange(0, BLOCK_R)
        inside = col < half
        mask = here & inside[None, :]
        cos_low = tl.load(cos_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos_ptr + half + col, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin_ptr + half + col, mask=inside, other=0.0).to(tl.float32)[None, :]
        low = tl.load(x_head + col[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x_head + half + col[None, :], mask=mask, other=0.0).to(tl.float32)
        low, high = _rotate(low, high, cos_low, cos_high, sin_low, sin_high, INVERSE)
        tl.store(y_head + col[None, :], low.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_head + half + col[None, :], high.to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        col = ROTARY_DIM + tl.arange(0, BLOCK_REST)
        mask = here & (col < HEAD_DIM)[None, :]
        tl.store(y_head + col[None, :], tl.load(x_head + col[None, :], mask=mask), mask=mask)


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_qob,
    stride_qoh,
    stride_qos,
    stride_kob,
    stride_koh,
    stride_kos,
    stride_cb,
    stride_cs,
    stride_sb,
    stride_ss,
    q_heads,
    k_heads,
    seq_len,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0)
    b = (row // seq_len).to(tl.int64)
    s = (row % seq_len).to(tl.int64)
    cos_ptr += b * stride_cb + s * stride_cs
    sin_ptr += b * stride_sb + s * stride_ss
    q_tiles = tl.cdiv(q_heads, BLOCK_H)
    tile = tl.program_id(1)
    if tile < q_tiles:
        _rotate_heads(
            q_ptr + b * stride_qb + s * stride_qs,
            q_out_ptr + b * stride_qob + s * stride_qos,
            stride_qh,
            stride_qoh,
            cos_ptr,
            sin_ptr,
            tile * BLOCK_H,
            q_heads,
            HEAD_DIM,
            ROTARY_DIM,
            INTERLEAVED,
            INVERSE,
            BLOCK_H,
            BLOCK_R,
            BLOCK_REST,
        )
    else:
        _rotate_heads(
            k_ptr + b * stride_kb + s * stride_ks,
            k_out_ptr + b * stride_kob + s * stride_kos,
            stride_kh,
            stride_koh,
            cos_ptr,
            sin_ptr,
            (tile - q_tiles) * BLOCK_H,
            k_heads,
            HEAD_DIM,
            ROTARY_DIM,
            INTERLEAVED,
            INVERSE,
            BLOCK_H,
            BLOCK_R,
            BLOCK_REST,
        )


def forward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return _launch_on(*args, inverse=False)


def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    *grads, cos, sin, interleaved, output_mask = args
    query, key = (grad if needed else None for grad, needed in zip(grads, output_mask, strict=True))
    return _launch_on(query, key, cos, sin, interleaved, inverse=True)


def supports(*args: Any) -> str | None:
    heads = next(tensor for tensor in args if tensor is not None)
    return f"head_dim {heads.shape[-1]} is above 2048" if heads.shape[-1] > 2048 else None


supports_backward = supports


def _launch_on(*args: Any, inverse: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    query, key, cos, sin, interleaved = args
    inputs = [None if x is None else _with_dense_rows(x) for x in (query, key)]
    outputs = [None if x is None else torch.empty_like(x) for x in inputs]
    nonempty = [x for x in inputs if x is not None and x.numel() > 0]
    if not nonempty:
        return outputs[0], outputs[1]
    any_input = nonempty[0]
    batch, _, seq_len, head_dim = any_input.shape
    cos, sin = _with_dense_rows(cos), _with_dense_rows(sin)
    rotary_dim = cos.shape[-1]
    heads = [0 if x is None else x.shape[1] for x in inputs]
    blocks = _blocks(max(heads), rotary_dim, head_dim)
    stand_ins = [any_input if x is None else x for x in (*inputs, *outputs)]
    strides = [stride for x in stand_ins for stride in x.stride()[:3]]
    for table in (cos, sin):
        has_batch = table.dim() == 3 and table.shape[0] > 1
        strides += [table.stride(0) if has_batch else 0, table.stride(-2)]
    tiles = sum(triton.cdiv(num, blocks["BLOCK_H"]) for num in heads)
    form = {"HEAD_DIM": head_dim, "ROTARY_DIM": rotary_dim}
    form |= {"INTERLEAVED": interleaved, "INVERSE": inverse}
    with _launch.device_of(any_input):
        _kernel[(batch * seq_len, tiles)](
            *stand_ins, cos, sin, *strides, *heads, seq_len, **form, **blocks, **_OPTIONS
        )
    return outputs[0], outputs[1]


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocks(heads: int, rotary_dim: int, head_dim: int) -> dict[str, int]:
    """Return heads and pairs of a tile, and the columns beyond the rotated ones."""
    block_r = triton.next_power_of_2(rotary_dim // 2)
    rest = head_dim - rotary_dim
    block_rest = triton.next_power_of_2(rest) if rest else 0
    widest = max(block_r, block_rest // 2)
    block_h = max(1, min(triton.next_power_of_2(heads), _PAIRS // widest))
    return {"BLOCK_H": block_h, "BLOCK_R": block_r, "BLOCK_REST": block_rest}
