"""moe_router_loss in Triton: forward, backward, launchers.

A program holds a tile of a few tokens by all experts in registers; the logits are read once. The
forward adds the tokens of a program and writes one number, and torch adds the programs' in a fixed
order: no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._arguments import RouterLossArguments
from fusedops.kernels.moe_route import relative_sigmoid
from fusedops.kernels.moe_route import supports as supports


@triton.jit
def _tile(
    x_ptr,
    w_ptr,
    mask_ptr,
    num_tokens,
    num_experts,
    tokens_per_weight,
    BALANCE: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return logits, weights, offsets, what may be stored, which columns exist, who counts."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.arange(0, BLOCK_E)[None, :]
    real = (token < num_tokens)[:, None] & (col < num_experts)
    offset = token[:, None].to(tl.int64) * num_experts + col
    # Tokens past the last are rows of zeros: they count for nothing, and divide by no zero.
    there = tl.broadcast_to(col < num_experts, (BLOCK_T, BLOCK_E))
    x = tl.load(x_ptr + offset, mask=real, other=0.0).to(tl.float32)
    x = tl.where(there, x, float("-inf"))
    w = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if BALANCE:
        row = (token // tokens_per_weight)[:, None].to(tl.int64) * num_experts
        w = tl.load(w_ptr + row + col, mask=real, other=0.0)
    counts = token < num_tokens
    if MASK:
        counts = counts & (tl.load(mask_ptr + token, mask=counts, other=0) != 0)
    return x, w, offset, real, there, counts


@triton.jit
def _softmax(x, there):
    peak = tl.max(x, axis=1)
    # As torch's logsumexp: its logarithm is then infinite.
    peak = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    e = tl.where(there, tl.exp(x - peak[:, None]), 0.0)
    total = tl.sum(e, axis=1)
    return e / total[:, None], peak + tl.log(total)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_weight"])
def _forward_kernel(
    x_ptr,
    w_ptr,
    z_ptr,
    mask_ptr,
    sums_ptr,
    num_tokens,
    num_experts,
    tokens_per_weight,
    SIGMOID: tl.constexpr,
    BALANCE: tl.constexpr,
    Z: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    x, w, _, _, there, counts = _tile(
        x_ptr,
        w_ptr,
        mask_ptr,
        num_tokens,
        num_experts,
        tokens_per_weight,
        BALANCE,
        MASK,
        BLOCK_T,
        BLOCK_E,
    )
    loss = tl.zeros((BLOCK_T,), tl.float32)
    p, lse = _softmax(x, there)
    if BALANCE:
        if SIGMOID:
            p, _ = relative_sigmoid(x)
            p = p / tl.sum(p, axis=1)[:, None]
        # The select keeps LLVM from contracting the product into the sum over lanes: a lane would
        # add its own exact product to a rounded one, and lanes with the same row would differ.
        loss += tl.sum(tl.where(there, p * w, 0.0), axis=1)
    if Z:
        loss += tl.load(z_ptr) * lse * lse
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(counts, loss, 0.0), axis=0))


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_weight"])
def _backward_kernel(
    grad_ptr,
    x_ptr,
    w_ptr,
    z_ptr,
    mask_ptr,
    dx_ptr,
    num_tokens,
    num_experts,
    tokens_per_weight,
    SIGMOID: tl.constexpr,
    BALANCE: tl.constexpr,
    Z: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    x, w, offset, real, there, counts = _tile(
        x_ptr,
        w_ptr,
        mask_ptr,
        num_tokens,
        num_experts,
        tokens_per_weight,
        BALANCE,
        MASK,
        BLOCK_T,
        BLOCK_E,
    )
    dx = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    p, lse = _softmax(x, there)
    if Z:
        dx += p * (2.0 * tl.load(z_ptr) * lse)[:, None]
    if BALANCE:
        slope = p
        if SIGMOID:
            p, falling = relative_sigmoid(x)
            p = p / tl.sum(p, axis=1)[:, None]
            slope = p * falling
        dx += slope * (w - tl.sum(p * w, axis=1)[:, None])
    dx = tl.where(counts[:, None], dx * tl.load(grad_ptr), 0.0)
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=real)


def _blocks(num_experts: int) -> _launch.Tiling:
    block_e = max(2, triton.next_power_of_2(num_experts))
    block_t = max(1, min(64, 2048 // block_e))
    return {"BLOCK_T": block_t, "BLOCK_E": block_e}, _launch.row_options(block_t * block_e)


def _of(call: RouterLossArguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what both kernels take, but for what they write: pointers and sizes, and constants."""
    tokens, experts = call.logits.shape
    per_weight = max(1, tokens // (1 if call.weights is None else call.weights.shape[0]))
    wide = None if call.weights is None else call.weights.float()
    z = None if call.z_weight is None else call.z_weight.float()
    masked = None if call.mask is None else call.mask.contiguous().view(torch.uint8)
    x = call.logits.contiguous()
    pointers = {
        "x_ptr": x,
        "w_ptr": _launch.dense(wide, x),
        "z_ptr": _launch.dense(z, x),
        "mask_ptr": _launch.dense(masked, x),
    }
    sizes = {"num_tokens": tokens, "num_experts": experts, "tokens_per_weight": per_weight}
    blocks, options = _blocks(experts)
    constants = {
        "SIGMOID": call.score == "sigmoid",
        "BALANCE": call.weights is not None,
        "Z": call.z_weight is not None,
        "MASK": call.mask is not None,
    }
    return pointers | sizes, constants | blocks | options


def forward(*args: Any) -> torch.Tensor:
    data, constants = _of(RouterLossArguments(*args))
    x = data["x_ptr"]
    programs = triton.cdiv(x.shape[0], constants["BLOCK_T"])
    sums = x.new_empty(programs, dtype=torch.float32)
    if programs:
        with _launch.device_of(x):
            _forward_kernel[(programs,)](**data, sums_ptr=sums, **constants)
    return sums.sum()


def backward(grad_loss: torch.Tensor, *args: Any) -> torch.Tensor | None:
    *inputs, output_mask = args
    if not output_mask[0]:
        return None
    data, constants = _of(RouterLossArguments(*inputs))
    x = data["x_ptr"]
    dx = torch.empty_like(x)
    programs = triton.cdiv(x.shape[0], constants["BLOCK_T"])
    if programs:
        grad = grad_loss.float().contiguous()
        with _launch.device_of(x):
            _backward_kernel[(programs,)](grad_ptr=grad, **data, dx_ptr=dx, **constants)
    return dx
