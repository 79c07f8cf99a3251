"""moe_unpermute in Triton: the backward kernel and the launchers.

The forward is ``_moe_rows.combine``. The backward of the weighted sum has a program per slot: it
walks over the columns, writes ``probs * grad`` to the slot's row and keeps the product of row and
gradient in registers. Unweighted it is ``_moe_rows.scatter``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch, _moe_rows

_BLOCK = 1024


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    probs_ptr,
    dx_ptr,
    dprobs_ptr,
    positions_ptr,
    real_ptr,
    stride_dy,
    stride_x,
    num_cols,
    top_k,
    WANTS_INPUT: tl.constexpr,
    WANTS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(positions_ptr + slot).to(tl.int64)
    kept = row < tl.load(real_ptr)
    dy_row = dy_ptr + slot // top_k * stride_dy
    x_row = x_ptr + row * stride_x
    dx_row = dx_ptr + row * num_cols
    prob = tl.load(probs_ptr + slot, mask=kept, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = (col < num_cols) & kept
        dy = tl.load(dy_row + col, mask=mask, other=0.0).to(tl.float32)
        if WANTS_PROBS:
            total += dy * tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
        if WANTS_INPUT:
            dx = (prob * dy).to(dx_ptr.dtype.element_ty)
            tl.store(dx_row + col, dx, mask=col < num_cols)
    if WANTS_PROBS:
        tl.store(dprobs_ptr + slot, tl.sum(total, axis=0))


forward = _moe_rows.combine


def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, input, probs, positions, offsets, output_mask = args
    if probs is None:
        needed = output_mask[0]
        return _moe_rows.scatter(grad_output, positions, offsets) if needed else None, None
    dy = _moe_rows.with_dense_rows(grad_output)
    slots, num_cols = positions.numel(), dy.shape[1]
    dx = dy.new_empty(slots, num_cols) if output_mask[0] else None
    dprobs = probs.new_empty(probs.shape) if output_mask[1] else None
    if slots == 0 or (dx is None and dprobs is None):
        return dx, dprobs
    x = dy if dprobs is None or input is None else _moe_rows.with_dense_rows(input)
    targets = (dy if dx is None else dx, probs if dprobs is None else dprobs)
    tensors = (dy, x, probs.contiguous(), *targets, positions.contiguous(), offsets[-1:])
    sizes = (dy.stride(0), x.stride(0), num_cols, positions.shape[1])
    wants = {"WANTS_INPUT": dx is not None, "WANTS_PROBS": dprobs is not None}
    with _launch.device_of(dy):
        _backward_kernel[(slots,)](*tensors, *sizes, **wants, BLOCK=_BLOCK, **_launch.FOUR_WARPS)
    return dx, dprobs
