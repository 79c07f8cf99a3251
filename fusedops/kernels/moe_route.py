"""moe_route in Triton: forward, backward, launchers.

A program holds a tile of a few tokens by all experts in registers. What decides, a logit or a
score, becomes a key of 64 bits: the value's bits in an order that integers have too, above the
expert's index counted from the end. Keys are all different: the largest is the best expert, of
equals the first one, and the next best is the largest key below it. The logits are read once; ids
and weights are written once. What a capacity keeps is decided by sorts on the device
(``_moe_drop.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._arguments import RouteOptions
from fusedops.kernels._device import PHILOX_ROUNDS
from fusedops.kernels._moe_drop import drop

MAX_EXPERTS = 4096


@triton.jit
def _jitter_factors(index, seed_ptr, jitter):
    """Return the factors of elements ``index`` (int64); ``_core/philox.py`` specifies the draw."""
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    counter = index >> 2
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, offset_low, offset_high, PHILOX_ROUNDS)
    word = index & 3
    drawn = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    uniform = (drawn >> 8).to(tl.float32)
    return 1.0 + jitter * (uniform * 1.1920928955078125e-07 - 1.0)


@triton.jit
def _prepare(x, index, seed_ptr, jitter, JITTER: tl.constexpr):
    """Widen logits: NaN becomes -inf, +inf the largest finite number; return the factors too."""
    x = x.to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    factor = tl.full(x.shape, 1.0, tl.float32)
    if JITTER:
        factor = _jitter_factors(index, seed_ptr, jitter)
        x = x * factor
    return tl.minimum(x, 3.4028234663852886e38), factor


@triton.jit
def _softmax(x):
    """Softmax over the last axis; a row of -inf gives 0."""
    peak = tl.maximum(tl.max(x, axis=1), -3.4028234663852886e38)
    e = tl.exp(x - peak[:, None])
    total = tl.sum(e, axis=1)
    return e * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def _sigmoid(x):
    """Return sigmoid(x) without overflow, and sigmoid(-x)."""
    t = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + t)
    return tl.where(x < 0.0, t * large, large), tl.where(x < 0.0, large, t * large)


@triton.jit
def relative_sigmoid(x):
    """Return sigmoid(x), relative to exp(largest x) where a row is negative, and sigmoid(-x).

    Divided by their sum they are the normalised sigmoids, and neither underflows.
    """
    peak = tl.maximum(tl.minimum(tl.max(x, axis=1), 0.0), -3.4028234663852886e38)[:, None]
    e = tl.exp(-tl.abs(x) - peak)
    t = e * tl.exp(peak)
    large = 1.0 / (1.0 + t)
    return tl.where(x < 0.0, e * large, large), tl.where(x < 0.0, large, t * large)


@triton.jit
def _normalized_sigmoid(x):
    """Return sigmoid(x) divided by its sum over the last axis, 0 in a row of -inf; sigmoid(-x)."""
    s, falling = relative_sigmoid(x)
    total = tl.sum(s, axis=1)[:, None]
    return s / tl.where(total == 0.0, 1.0, total), falling


@triton.jit
def _keys(values, index, count):
    """Return keys that order as (value, -index) does; NaN is -inf, -0 is 0."""
    values = tl.where(values != values, float("-inf"), values) + 0.0
    bits = values.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (count - 1 - index).to(tl.int64)


@triton.jit
def _value_of(key):
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _best_below(keys, bound):
    """Return each row's largest key below ``bound``; the least integer where none is left."""
    nothing = tl.full(keys.shape, -0x8000000000000000, tl.int64)
    return tl.max(tl.where(keys < bound[:, None], keys, nothing), axis=1)


@triton.jit
def _close_groups(
    keys,
    col,
    num_groups,
    topk_groups,
    group_size,
    TOP2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Leave the keys of the best groups only."""
    nothing = tl.full(keys.shape, -0x8000000000000000, tl.int64)
    above = tl.full((BLOCK_T,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    group = tl.arange(0, BLOCK_G)[None, :]
    of_groups = tl.full((BLOCK_T, BLOCK_G), -0x8000000000000000, tl.int64)
    of_col = col // group_size
    for g in range(num_groups):
        here = tl.where(of_col == g, keys, nothing)
        best = tl.max(here, axis=1)
        value = _value_of(best)
        if TOP2:
            value = value + _value_of(_best_below(here, best))
        key = _keys(value, tl.full((BLOCK_T,), 0, tl.int32) + g, num_groups)
        of_groups = tl.where(group == g, key[:, None], of_groups)
    last = above
    open_ = tl.full(keys.shape, 0, tl.int32)
    for _ in range(topk_groups):
        last = _best_below(of_groups, last)
        chosen = num_groups - 1 - (last & 0xFFFFFFFF).to(tl.int32)
        open_ = open_ | (of_col == chosen[:, None]).to(tl.int32)
    return tl.where(open_ != 0, keys, nothing)


@triton.jit(do_not_specialize=["num_tokens", "top_k", "num_groups", "topk_groups"])
def _forward_kernel(
    x_ptr,
    bias_ptr,
    seed_ptr,
    given_ptr,
    ids_ptr,
    probs_ptr,
    num_tokens,
    num_experts,
    top_k,
    num_groups,
    topk_groups,
    scaling,
    jitter,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    CHOICE: tl.constexpr,
    JITTER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """``CHOICE`` says where ids come from: ``"best"``, ``"given"`` or ``"all"``."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < num_tokens
    col = tl.arange(0, BLOCK_E)[None, :]
    place = tl.arange(0, BLOCK_K)[None, :]
    index = token[:, None].to(tl.int64) * num_experts + col
    there = exists[:, None] & (col < num_experts)
    raw = tl.load(x_ptr + index, mask=there, other=float("-inf"))
    x, _ = _prepare(raw, index, seed_ptr, jitter, JITTER)
    slots = token[:, None].to(tl.int64) * top_k + place
    real = exists[:, None] & (place < top_k)
    SUMS: tl.constexpr = GROUPS and TOP2
    values = x
    if (not NORMALIZE and not SIGMOID) or BIAS or SUMS or CHOICE == "all":
        if SIGMOID:
            values, _ = _sigmoid(x)
        else:
            values = _softmax(x)
    ids = tl.full((BLOCK_T, BLOCK_K), 0, tl.int32) + place
    if CHOICE == "given":
        ids = tl.load(given_ptr + slots, mask=real, other=0)
    if CHOICE == "best":
        if BIAS:
            bias = tl.load(bias_ptr + col, mask=col < num_experts, other=0.0)
            keys = _keys(values + bias, col, num_experts)
        elif SUMS:
            keys = _keys(values, col, num_experts)
        else:
            keys = _keys(x, col, num_experts)
        nothing = tl.full((BLOCK_T, BLOCK_E), -0x8000000000000000, tl.int64)
        keys = tl.where(col < num_experts, keys, nothing)
        if GROUPS:
            size = num_experts // num_groups
            keys = _close_groups(keys, col, num_groups, topk_groups, size, TOP2, BLOCK_T, BLOCK_G)
        last = tl.full((BLOCK_T,), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for j in range(top_k):
            last = _best_below(keys, last)
            chosen = num_experts - 1 - (last & 0xFFFFFFFF).to(tl.int32)
            ids = tl.where(place == j, chosen[:, None], ids)
    if CHOICE == "all":
        weights = values
    else:
        # From the tile in registers: of each place the one column that its id names.
        weights = tl.full((BLOCK_T, BLOCK_K), float("-inf"), tl.float32)
        whole: tl.constexpr = not NORMALIZE and not SIGMOID
        for j in range(top_k):
            chosen = tl.sum(tl.where(place == j, ids, 0), axis=1)
            source = values if whole else x
            value = tl.max(tl.where(col == chosen[:, None], source, float("-inf")), axis=1)
            weights = tl.where(place == j, value[:, None], weights)
        if SIGMOID:
            if NORMALIZE:
                weights, _ = _normalized_sigmoid(weights)
            else:
                weights, _ = _sigmoid(weights)
        elif NORMALIZE:
            weights = _softmax(weights)
    tl.store(ids_ptr + slots, ids, mask=real)
    tl.store(probs_ptr + slots, weights * scaling, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "top_k"])
def _backward_kernel(
    grad_ptr,
    x_ptr,
    seed_ptr,
    ids_ptr,
    kept_ptr,
    dx_ptr,
    num_tokens,
    num_experts,
    top_k,
    scaling,
    jitter,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    KEPT: tl.constexpr,
    JITTER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < num_tokens
    col = tl.arange(0, BLOCK_E)[None, :]
    place = tl.arange(0, BLOCK_K)[None, :]
    row = token[:, None].to(tl.int64) * num_experts
    there = exists[:, None] & (col < num_experts)
    slots = token[:, None].to(tl.int64) * top_k + place
    real = exists[:, None] & (place < top_k)
    ids = tl.load(ids_ptr + slots, mask=real, other=0)
    grad = tl.load(grad_ptr + slots, mask=real, other=0.0) * scaling
    if KEPT:
        grad = tl.where(tl.load(kept_ptr + slots, mask=real, other=0) != 0, grad, 0.0)
    raw = tl.load(x_ptr + row + ids, mask=real, other=float("-inf"))
    chosen, _ = _prepare(raw, row + ids, seed_ptr, jitter, JITTER)
    whole: tl.constexpr = not NORMALIZE and not SIGMOID
    factor = tl.full((BLOCK_T, BLOCK_E), 1.0, tl.float32)
    if whole:
        raw = tl.load(x_ptr + row + col, mask=there, other=float("-inf"))
        x, factor = _prepare(raw, row + col, seed_ptr, jitter, JITTER)
        peak = tl.maximum(tl.max(x, axis=1), -3.4028234663852886e38)[:, None]
        e = tl.exp(x - peak)
        total = tl.sum(e, axis=1)[:, None]
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        s = tl.exp(chosen - peak) * inverse
        along = tl.sum(grad * s, axis=1)[:, None]
        dx = e * inverse * -along
        part = s * grad
    elif SIGMOID:
        dx = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        if NORMALIZE:
            s, falling = _normalized_sigmoid(chosen)
            grad -= tl.sum(grad * s, axis=1)[:, None]
        else:
            s, falling = _sigmoid(chosen)
        part = s * falling * grad
    else:
        dx = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        s = _softmax(chosen)
        part = s * (grad - tl.sum(grad * s, axis=1)[:, None])
    for j in range(top_k):
        mine = place == j
        to = tl.sum(tl.where(mine, ids, 0), axis=1)
        amount = tl.sum(tl.where(mine, part, 0.0), axis=1)
        dx += tl.where(col == to[:, None], amount[:, None], 0.0)
    if JITTER:
        if not whole:
            factor = _jitter_factors(row + col, seed_ptr, jitter)
        dx = dx * factor
    tl.store(dx_ptr + row + col, dx.to(dx_ptr.dtype.element_ty), mask=there)


def _tile(num_experts: int, top_k: int) -> _launch.Tiling:
    """Return block sizes and launch options: 8 keys of 64 bits a thread."""
    block_e = max(2, triton.next_power_of_2(num_experts))
    block_k = max(2, triton.next_power_of_2(top_k))
    block_t = max(1, min(64, 1024 // max(block_e, block_k)))
    num_warps = max(1, min(16, block_t * block_e // 256))
    blocks = {"BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_K": block_k}
    return blocks, {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, bias, seed, chosen, chosen_kept, *numbers = args
    options = RouteOptions(*numbers)
    x = logits.contiguous()
    num_tokens, num_experts = x.shape
    every = options.drop_policy == "expert_choice"
    slots = num_experts if every else options.top_k
    ids = x.new_empty((num_tokens, slots), dtype=torch.int32)
    probs = x.new_empty((num_tokens, slots), dtype=torch.float32)
    kept = x.new_empty((0 if options.capacity < 0 else num_tokens, slots), dtype=torch.bool)
    if num_tokens == 0:
        return probs, ids, kept
    choice = "given" if chosen is not None else "all" if every else "best"
    groups = options.topk_groups < options.num_groups and choice == "best"
    blocks, launch = _tile(num_experts, slots)
    added = x if bias is None else bias.float().contiguous()
    tensors = (x, added, _launch.dense(seed, x), _launch.dense(chosen, ids), ids, probs)
    sizes = (num_tokens, num_experts, slots, options.num_groups, options.topk_groups)
    flags = _flags(options, seed) | {"BIAS": bias is not None, "GROUPS": groups, "CHOICE": choice}
    flags["TOP2"] = options.group_score == "top2_sum"
    flags["BLOCK_G"] = max(2, triton.next_power_of_2(options.num_groups)) if groups else 2
    with _launch.device_of(x):
        _forward_kernel[(triton.cdiv(num_tokens, blocks["BLOCK_T"]),)](
            *tensors, *sizes, options.scaling, options.jitter, **flags, **blocks, **launch
        )
    if options.capacity < 0:
        return probs, ids, kept
    if chosen_kept is not None:
        kept.copy_(chosen_kept)
    else:
        ids, kept = drop(ids, probs, num_experts, options.capacity, options.drop_policy)
    return torch.where(kept, probs, 0.0), ids, kept


def backward(*args: Any) -> torch.Tensor | None:
    grad_probs, logits, seed, expert_ids, kept, *rule, output_mask = args
    options = RouteOptions(*rule)
    if not output_mask[0]:
        return None
    x = logits.contiguous()
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx
    num_tokens, num_experts = x.shape
    slots = expert_ids.shape[1]
    blocks, launch = _tile(num_experts, slots)
    mask = kept.contiguous().view(torch.uint8) if options.capacity >= 0 else expert_ids
    ids, grad = expert_ids.contiguous(), grad_probs.float().contiguous()
    tensors = (grad, x, _launch.dense(seed, x), ids, mask, dx)
    numbers = (num_tokens, num_experts, slots, options.scaling, options.jitter)
    flags = _flags(options, seed) | {"KEPT": options.capacity >= 0}
    with _launch.device_of(x):
        _backward_kernel[(triton.cdiv(num_tokens, blocks["BLOCK_T"]),)](
            *tensors, *numbers, **flags, **blocks, **launch
        )
    return dx


def _flags(options: RouteOptions, seed: torch.Tensor | None) -> dict[str, Any]:
    sigmoid = options.score == "sigmoid"
    return {"SIGMOID": sigmoid, "NORMALIZE": options.normalize, "JITTER": seed is not None}


def supports(logits: torch.Tensor, *args: Any) -> str | None:
    if logits.dtype == torch.float64:
        return "Triton's kernels take float32, bfloat16 and float16"
    if logits.shape[1] > MAX_EXPERTS:
        return f"a program holds at most {MAX_EXPERTS} experts"
    return None
