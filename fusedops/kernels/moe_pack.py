"""moe_pack in Triton: one program per packed row.

Rows are copied as integers of the size of their elements: bits, whatever the dtype. Float8 codes
are made by integer arithmetic, to nearest even, so that sm_80, which has no float8, runs it too and
every backend writes the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core import dtypes
from fusedops.kernels import _launch
from fusedops.kernels._arguments import PackArguments

_MAX_BLOCK = 2048
_INTEGERS = {2: torch.int16, 4: torch.int32}


@triton.jit
def _to_float8(x):
    """Return the e4m3 code of float32 ``x``, which is at most 448 in magnitude or not finite."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the sum with 2^14 rounds to a multiple of 2^-9, the spacing there.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    tiny = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, tiny, normal)
    code = tl.where(magnitude > 0x43E00000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pack_kernel(
    x_ptr,
    probs_ptr,
    ids_ptr,
    index_ptr,
    count_ptr,
    bytes_ptr,
    elements_ptr,
    words_ptr,
    num_tokens,
    num_cols,
    top_k,
    span,
    stride_x,
    data_bytes,
    probs_at,
    ids_at,
    scale_at,
    stride,
    HAS_IDS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    real = True
    if HAS_COUNT:
        real = row < tl.load(count_ptr)
    token = row
    if HAS_INDEX:
        slot = tl.load(index_ptr + row, mask=real, other=0)
        real = real & (slot >= 0) & (slot < tl.cast(num_tokens, tl.int64) * top_k)
        slot = tl.where(real, slot, 0)
        token = (slot // top_k).to(tl.int64)  # in 32 bits: GPUs divide 64 bits in a subroutine
    x_row = x_ptr + token * stride_x
    if QUANTIZED:
        largest = tl.zeros((BLOCK_N,), tl.int32)
        for first in range(0, num_cols, BLOCK_N):
            col = first + tl.arange(0, BLOCK_N)
            x = tl.load(x_row + col, mask=(col < num_cols) & real, other=0.0).to(tl.float32)
            magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.maximum(largest, tl.where(magnitude < 0x7F800000, magnitude, 0))
        top = tl.max(largest, axis=0)
        exponent = (top >> 23) - 135 + tl.where((top & 0x7FFFFF) > 0x600000, 1, 0)
        exponent = tl.maximum(exponent, -126)
        inverse = _power_of_two(-exponent)
        for first in range(0, num_cols, BLOCK_N):
            col = first + tl.arange(0, BLOCK_N)
            x = tl.load(x_row + col, mask=(col < num_cols) & real, other=0.0).to(tl.float32)
            tl.store(bytes_ptr + row * stride + col, _to_float8(x * inverse), mask=col < num_cols)
        scale = _power_of_two(exponent).to(tl.int32, bitcast=True)
        tl.store(words_ptr + (row * stride + scale_at) // 4, tl.where(real, scale, 0))
    else:
        to = elements_ptr + row * (stride // ELEMENT_BYTES)
        for first in range(0, num_cols, BLOCK_N):
            col = first + tl.arange(0, BLOCK_N)
            x = tl.load(x_row + col, mask=(col < num_cols) & real, other=0)
            tl.store(to + col, x, mask=col < num_cols)
    pair = tl.arange(0, BLOCK_K)
    if HAS_INDEX and not HAS_SPAN:
        inside = pair < 1
        source = slot + pair
    else:
        inside = pair < top_k
        source = token * top_k + pair
    probs = tl.load(probs_ptr + source, mask=inside & real, other=0)
    ids = tl.full((BLOCK_K,), -1, tl.int32)
    if HAS_IDS:
        ids = tl.load(ids_ptr + source, mask=inside & real, other=0)
    if HAS_SPAN:
        place = tl.load(ids_ptr + slot, mask=real, other=0) // span
        here = (ids // span == place) & (ids >= 0)
        probs = tl.where(here, probs, 0)
        ids = tl.where(here, ids, -1)
    ids = tl.where(real, ids, 0)
    tl.store(words_ptr + (row * stride + probs_at) // 4 + pair, probs, mask=inside)
    tl.store(words_ptr + (row * stride + ids_at) // 4 + pair, ids, mask=inside)
    # What lies between the parts: at most 7 bytes, and at most 15 at the end.
    pad = tl.arange(0, 16)
    zero = tl.zeros((16,), tl.uint8)
    tl.store(bytes_ptr + row * stride + data_bytes + pad, zero, mask=data_bytes + pad < probs_at)
    end = scale_at + (4 if QUANTIZED else 0)
    tl.store(bytes_ptr + row * stride + end + pad, zero, mask=end + pad < stride)


def supports(*args: Any) -> str | None:
    probs = PackArguments(*args).probs
    return "it packs float32 probabilities" if probs.dtype != torch.float32 else None


def forward(*args: Any) -> torch.Tensor:
    call = PackArguments(*args)
    input, probs, expert_ids, index, num_rows, span, quantized, layout = call
    rows = call.rows
    num_tokens, num_cols = input.shape
    payload = torch.empty((rows, layout[-1]), dtype=torch.uint8, device=input.device)
    if rows == 0:
        return payload
    x = input if input.stride(1) == 1 or num_cols == 1 else input.contiguous()
    integer = _INTEGERS[input.element_size()]
    top_k = probs.shape[1]
    bits = dtypes.bits(probs, torch.int32)
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_cols))
    given = (_launch.dense(tensor, bits) for tensor in (expert_ids, index, num_rows))
    views = (payload, payload.view(integer), payload.view(torch.int32))
    tensors = (x if quantized else x.view(integer), bits, *given, *views)
    data_bytes = num_cols * (1 if quantized else input.element_size())
    sizes = (num_tokens, num_cols, top_k, span, x.stride(0), data_bytes)
    flags = {"HAS_IDS": expert_ids is not None, "HAS_INDEX": index is not None}
    flags |= {"HAS_COUNT": num_rows is not None, "HAS_SPAN": span > 0, "QUANTIZED": quantized}
    blocks = {"BLOCK_K": max(1, triton.next_power_of_2(top_k)), "BLOCK_N": block}
    blocks |= {"ELEMENT_BYTES": input.element_size()} | _launch.row_options(block)
    with _launch.device_of(input):
        _pack_kernel[(rows,)](*tensors, *sizes, *layout, **flags, **blocks)
    return payload
