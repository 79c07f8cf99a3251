"""The backward of attention: launches of its kernels, and the parts that need no scores.

FlashAttention-2's formulae without its atomics, the same bits in every run:

* ``delta = rowsum(grad_output * output) - grad_lse``, one number per row (here);
* ``keys_kernel``: gradients of keys and values;
* ``queries_kernel``: gradients of queries, and of an additive mask.

Both kernels recompute the probabilities from the scores and the log-sum-exp of the forward: seven
products, where a single kernel with atomics would need five.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._core.layouts import heads_inside
from fusedops.kernels import _launch
from fusedops.kernels._attention_backward_keys import keys_kernel
from fusedops.kernels._attention_backward_queries import queries_kernel
from fusedops.kernels._attention_device import load_tile
from fusedops.kernels._attention_launch import AttentionCall, blocks, readable


@triton.jit(do_not_specialize=["num_blocks", "num_heads", "num_rows"])
def delta_kernel(
    do_ptr,
    out_ptr,
    rest_ptr,
    dlse_ptr,
    lse_ptr,
    delta_ptr,
    stride_dob,
    stride_doh,
    stride_dos,
    stride_lb,
    stride_lh,
    stride_ls,
    num_blocks,
    num_heads,
    num_rows,
    VALUE_DIM: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    start = tl.program_id(0) % num_blocks * BLOCK_M
    head = tl.program_id(0) // num_blocks
    h = head % num_heads
    n = (head // num_heads).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    mask = row < num_rows - start
    wide = tl.cast(start, tl.int64)
    do_base = do_ptr + n * stride_dob + h.to(tl.int64) * stride_doh + wide * stride_dos
    stride_os = num_heads * VALUE_DIM
    out_base = out_ptr + (n * num_rows + start) * stride_os + h * VALUE_DIM
    do = load_tile(do_base, row, stride_dos, num_rows - start, VALUE_DIM, BLOCK_DV, True)
    out = load_tile(out_base, row, stride_os, num_rows - start, VALUE_DIM, BLOCK_DV, True)
    wide_out = out.to(tl.float32)
    if HAS_REST:
        rest_base = rest_ptr + (n * num_rows + start) * stride_os + h * VALUE_DIM
        rest = load_tile(rest_base, row, stride_os, num_rows - start, VALUE_DIM, BLOCK_DV, True)
        wide_out += rest.to(tl.float32)
    delta = tl.sum(do.to(tl.float32) * wide_out, 1)
    statistics = head.to(tl.int64) * num_rows + start + row
    if HAS_DLSE:
        # A row without keys has no log-sum-exp to differentiate.
        lse = tl.load(lse_ptr + statistics, mask=mask, other=0.0)
        dlse_base = dlse_ptr + n * stride_lb + h.to(tl.int64) * stride_lh + wide * stride_ls
        dlse = tl.load(dlse_base + row.to(tl.int64) * stride_ls, mask=mask, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    tl.store(delta_ptr + statistics, delta, mask=mask)


def backward(call: AttentionCall, *tensors: Any) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; returns the gradients of query, key, value, mask and sinks.

    Tensors as in ``AttentionCall``: ``[B, H, Sq, ...]``; gradients lie in memory as ``[B, S, H,
    D]``.
    """
    grad_output, grad_lse, output, lse, remainder, lse_parts, output_mask = tensors
    query, key, value = call.query, call.key, call.value
    wants_query, wants_key, wants_value, wants_mask, wants_sinks = output_mask
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    do, lse = readable(grad_output), lse.contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = (
        new_heads_inside(tensor) if needed else None
        for tensor, needed in ((query, wants_query), (key, wants_key), (value, wants_value))
    )
    if query.shape[1] == 0:  # no program divides key heads among query heads
        dk, dv = (None if grad is None else grad.zero_() for grad in (dk, dv))
    ds = _new_scores(call) if wants_mask else None
    kind = "given"
    if query.dtype != torch.float32 and (wants_mask or wants_sinks):
        kind = "first" if wants_mask else "beside"
    exact = delta if kind == "given" else _minus_grad_lse(grad_lse, lse)
    with _launch.device_of(query):
        if lse.numel() and kind != "first":
            _launch_delta(do, heads_inside(output), remainder, grad_lse, lse, delta)
        shared = call.arguments() | call.strides("do", do)
        shared |= {"do_ptr": do, "lse_ptr": lse, "scale": call.scale}
        shared |= {"PARTS": lse_parts.numel() > 0}
        shared |= {"ONE_KEY": call.one_key and grad_lse is None}
        shared |= {"parts_ptr": lse_parts.contiguous() if lse_parts.numel() else lse}
        arguments, sizes, options = blocks("queries", call, shared)
        num_blocks = triton.cdiv(call.max_rows, sizes["BLOCK_M"])
        programs = num_blocks * query.shape[1] * call.sequences
        if programs and (wants_query or wants_mask or kind == "beside"):
            targets = {"dq_ptr": query if dq is None else dq, "ds_ptr": query if ds is None else ds}
            targets |= {"delta_ptr": delta, "exact_ptr": exact}
            flags = {"WANTS_QUERY": wants_query, "WANTS_SCORES": wants_mask, "DELTA": kind}
            queries_kernel[(programs,)](
                **arguments, **targets, num_blocks=num_blocks, **flags, **sizes, **options
            )
        arguments, sizes, options = blocks("keys", call, shared)
        num_blocks = triton.cdiv(call.max_keys, sizes["BLOCK_N"])
        programs = num_blocks * key.shape[1] * call.sequences if query.shape[1] else 0
        walks = [(wants_key, wants_value)]
        if wants_key and wants_value and max(sizes["BLOCK_D"], sizes["BLOCK_DV"]) > 128:
            # The registers hold one gradient of so large heads: a product more, and no spills.
            walks = [(True, False), (False, True)]
        targets = {"dk_ptr": query if dk is None else dk, "dv_ptr": query if dv is None else dv}
        targets["delta_ptr"] = exact if kind == "first" else delta
        for walk in walks:
            if programs and any(walk):
                flags = dict(zip(("WANTS_KEY", "WANTS_VALUE"), walk, strict=True))
                keys_kernel[(programs,)](
                    **arguments, **targets, num_blocks=num_blocks, **flags, **sizes, **options
                )
    dmask = dsinks = None
    if ds is not None:
        assert call.mask is not None
        dmask = ds.sum_to_size(call.mask.shape).to(call.mask.dtype)
    if wants_sinks:
        assert call.sinks is not None
        dsinks = _sinks_gradient(call.sinks, lse, exact)
    return dq, dk, dv, dmask, dsinks


def new_heads_inside(like: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, size = like.shape
    return like.new_empty(batch, rows, heads, size).transpose(1, 2)


def _new_scores(call: AttentionCall) -> torch.Tensor:
    """Return where the gradient of the scores is written; zero where no program writes.

    Float32, to sum over the broadcast dims of the mask; without such dims, the dtype of the mask.
    """
    assert call.mask is not None
    shape = (*call.query.shape[:3], call.key.shape[2])
    dtype = call.mask.dtype if call.mask.shape == shape else torch.float32
    skips = call.left >= 0 or call.right >= 0
    return (call.query.new_zeros if skips else call.query.new_empty)(shape, dtype=dtype)


def _launch_delta(*args: Any) -> None:
    do, output, remainder, grad_lse, lse, delta = args
    kept = remainder.numel() > 0
    batch, heads, rows, size = output.shape
    sizes = _delta_sizes(size)
    num_blocks = triton.cdiv(rows, sizes["BLOCK_M"])
    dlse = lse if grad_lse is None else grad_lse
    tensors = (do, output, heads_inside(remainder) if kept else output, dlse, lse, delta)
    strides = (*do.stride()[:3], *dlse.stride())
    flags = {"VALUE_DIM": size, "HAS_DLSE": grad_lse is not None, "HAS_REST": kept} | sizes
    delta_kernel[(num_blocks * heads * batch,)](
        *tensors, *strides, num_blocks, heads, rows, **flags, **_launch.FOUR_WARPS
    )


def _delta_sizes(value_dim: int) -> dict[str, int]:
    """Return block sizes of ``delta_kernel``: 32 elements of each operand a thread."""
    block_dv = max(16, triton.next_power_of_2(value_dim))
    return {"BLOCK_M": 4096 // block_dv, "BLOCK_DV": block_dv}


def _minus_grad_lse(grad_lse: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor:
    """Return what the sum of ``p * dp`` is added to."""
    if grad_lse is None:
        return torch.zeros_like(lse)
    # A row without keys has no log-sum-exp to differentiate.
    return torch.where(lse == -torch.inf, 0.0, -grad_lse)


def _sinks_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return ``-sum(exp(sink - lse) * delta)`` per head: a sink's value is zero."""
    weight = torch.exp(sinks[:, None] - lse)
    weight = torch.where(lse == -torch.inf, 0.0, weight)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
