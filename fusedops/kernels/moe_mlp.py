"""moe_mlp in Triton: the experts' first product with gate and probability, and the backward's pass.

Forward: the first product gathers the tokens' rows, and its tiles of sums become the hidden layer
before they are stored: half of a tile's columns are gates and half the factors of the same hidden
columns, or they alternate as they lie in memory. The second product is grouped_mm's kernel; the sum
over a token's rows is moe_unpermute's.

Backward: the gradient of the hidden layer is a product. From it one pass, a program per row,
computes the gradients of the pre-activation and of the row's probability, and recomputes the hidden
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _grouped, _launch, _moe_rows, _products
from fusedops.kernels._arguments import MoeArguments, of_backward
from fusedops.kernels._device import act_both, act_value, clamp, halves, split, with_slope
from fusedops.kernels._grouped import find_group
from fusedops.kernels._products import GROUP_M, bias_tile, load_weights, sum_of_pointers, tile_of
from fusedops.kernels.grouped_mm import supports as _supports_groups

_PASS_BLOCK = {"BLOCK": 512}


@triton.jit
def _gated_value(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    if ACTIVATION == "swiglu_oai":
        bounded = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return act_value(bounded, "fast_gelu", dtype) * (clamp(up, -7.0, 7.0) + 1.0)
    else:
        return act_value(gate, ACTIVATION, dtype) * up


@triton.jit
def _gated_gradients(grad, gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return the gated value, and the gradients of gate and up from its own."""
    if ACTIVATION == "swiglu_oai":
        bounded = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        factor = clamp(up, -7.0, 7.0) + 1.0
        value, slope = act_both(bounded, "fast_gelu", dtype)
        # As the gradient of torch's clamp: 0 of what was bounded, and of NaN.
        grad_gate = tl.where(gate <= 7.0, grad * (slope * factor), 0.0)
        grad_up = tl.where(tl.abs(up) <= 7.0, grad * value, 0.0)
        return value * factor, grad_gate, grad_up
    else:
        value, slope = act_both(gate, ACTIVATION, dtype)
        grad_gate = with_slope(grad, slope * up, gate, ACTIVATION)
        return value * up, grad_gate, grad * value


@triton.jit
def _add_bias(z, bias_ptr, col, num_cols):
    return z + tl.load(bias_ptr + col, mask=col < num_cols, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _expert_kernel(
    x_ptr,
    rows_ptr,
    scale_ptr,
    weight_ptr,
    bias_ptr,
    offsets_ptr,
    kept_ptr,
    y_ptr,
    num_rows,
    row_tiles,
    num_groups,
    width,
    inner,
    depth,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wk,
    stride_wn,
    HAS_BIAS: tl.constexpr,
    KEEPS: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_MODE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    tile, col_tile = tile_of(
        tl.program_id(0), row_tiles * BLOCK_M, width, GROUP_M, BLOCK_M, BLOCK_N
    )
    group, first_row, end = find_group(tile, offsets_ptr, num_groups, num_rows, GROUPS, BLOCK_M)
    if group >= num_groups:  # the second product does not read them
        return
    row = first_row + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    row_read = tl.where(row < end, row, first_row)
    x_row = tl.load(rows_ptr + row_read).to(tl.int64)
    x_ptrs = x_ptr + x_row[:, None] * stride_xm + k[None, :] * stride_xk
    bias_ptr += group.to(tl.int64) * width
    if TMA_MODE == "none":
        lane = tl.arange(0, BLOCK_N)
        if GATE == "halves":
            hidden_col = col_tile * HALF + lane % HALF
            col = hidden_col + tl.where(lane < HALF, 0, inner)
            in_cols = (hidden_col < inner)[None, :]
        else:
            col = col_tile * BLOCK_N + lane
            in_cols = (col < width)[None, :]
        weight_ptr += group.to(tl.int64) * stride_wg
        w_ptrs = weight_ptr + col.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
        total = sum_of_pointers(x_ptrs, w_ptrs, in_cols, depth, stride_xk, stride_wk, PRECISION)
        if GATE == "halves":
            gate_sum, up_sum = halves(total, BLOCK_M, BLOCK_N)
    elif GATE == "halves":
        # Two products of half the width, because gates and factors lie apart.
        hidden_col = col_tile * HALF + tl.arange(0, HALF)
        gate_sum = bias_tile(bias_ptr, hidden_col, inner, BLOCK_M, HAS_BIAS)
        up_sum = bias_tile(bias_ptr, inner + hidden_col, width, BLOCK_M, HAS_BIAS)
        for first in range(0, depth, BLOCK_K):
            x = tl.load(x_ptrs, mask=k[None, :] < depth - first, other=0.0)
            x_ptrs += BLOCK_K * stride_xk
            col = col_tile * HALF
            gate_weight = load_weights(weight_ptr, group, first, col, TMA_MODE, BLOCK_K, HALF)
            up_weight = load_weights(weight_ptr, group, first, inner + col, TMA_MODE, BLOCK_K, HALF)
            gate_sum = tl.dot(x, gate_weight, gate_sum, input_precision=PRECISION)
            up_sum = tl.dot(x, up_weight, up_sum, input_precision=PRECISION)
    else:
        col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        total = bias_tile(bias_ptr, col, width, BLOCK_M, HAS_BIAS)
        first_col = col_tile * BLOCK_N
        for first in range(0, depth, BLOCK_K):
            x = tl.load(x_ptrs, mask=k[None, :] < depth - first, other=0.0)
            x_ptrs += BLOCK_K * stride_xk
            w = load_weights(weight_ptr, group, first, first_col, TMA_MODE, BLOCK_K, BLOCK_N)
            total = tl.dot(x, w, total, input_precision=PRECISION)
    # The tile is finished in parts: all of it at once would not leave registers for the epilogue.
    scale = tl.load(scale_ptr + row_read).to(tl.float32)[:, None]
    LATE: tl.constexpr = HAS_BIAS and TMA_MODE == "none"
    z_corner = first_row.to(tl.int64) * width
    y_corner = first_row.to(tl.int64) * inner
    line = tl.arange(0, BLOCK_M)[:, None]
    in_rows = (row < end)[:, None]
    if GATE == "none":
        PART: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
        parts = split(total, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
        for part in tl.static_range(EPILOGUE_PARTS):
            z = parts[part]
            c = col_tile * BLOCK_N + part * PART + tl.arange(0, PART)
            if LATE:
                z = _add_bias(z, bias_ptr, c, width)
            mask = in_rows & (c < width)[None, :]
            if KEEPS:
                z_offset = z_corner + line * width + c[None, :]
                tl.store(kept_ptr + z_offset, z.to(kept_ptr.dtype.element_ty), mask=mask)
            dtype = y_ptr.dtype.element_ty
            y = (act_value(z, ACTIVATION, dtype) * scale).to(dtype)
            tl.store(y_ptr + y_corner + line * inner + c[None, :], y, mask=mask)
    else:
        HALF_PART: tl.constexpr = HALF // EPILOGUE_PARTS
        if GATE == "halves":
            gates = split(gate_sum, BLOCK_M, HALF, EPILOGUE_PARTS)
            ups = split(up_sum, BLOCK_M, HALF, EPILOGUE_PARTS)
        else:
            gates = split(total, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
            ups = gates
        for part in tl.static_range(EPILOGUE_PARTS):
            c = col_tile * HALF + part * HALF_PART + tl.arange(0, HALF_PART)
            mask = in_rows & (c < inner)[None, :]
            z_row = z_corner + line * width
            if GATE == "halves":
                gate, up = gates[part], ups[part]
                if LATE:
                    gate = _add_bias(gate, bias_ptr, c, width)
                    up = _add_bias(up, bias_ptr, inner + c, width)
                if KEEPS:
                    z_ptrs = kept_ptr + z_row + c[None, :]
                    tl.store(z_ptrs, gate.to(kept_ptr.dtype.element_ty), mask=mask)
                    tl.store(z_ptrs + inner, up.to(kept_ptr.dtype.element_ty), mask=mask)
            else:
                # Stored before the pairs are taken apart: whole vectors.
                z = gates[part]
                z_col = col_tile * BLOCK_N + 2 * part * HALF_PART + tl.arange(0, 2 * HALF_PART)
                if LATE:
                    z = _add_bias(z, bias_ptr, z_col, width)
                if KEEPS:
                    z_ptrs = kept_ptr + z_row + z_col[None, :]
                    z_mask = in_rows & (z_col < width)[None, :]
                    tl.store(z_ptrs, z.to(kept_ptr.dtype.element_ty), mask=z_mask)
                gate, up = tl.split(tl.reshape(z, (BLOCK_M, HALF_PART, 2)))
            dtype = y_ptr.dtype.element_ty
            y = (_gated_value(gate, up, ACTIVATION, dtype) * scale).to(dtype)
            tl.store(y_ptr + y_corner + line * inner + c[None, :], y, mask=mask)


@triton.jit
def _pass_kernel(
    d_ptr,
    z_ptr,
    scale_ptr,
    permutation_ptr,
    rows_ptr,
    offsets_ptr,
    dy_ptr,
    b2_ptr,
    dz_ptr,
    hidden_ptr,
    dprobs_ptr,
    num_groups,
    width,
    inner,
    out_size,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WANTS_GRAD: tl.constexpr,
    WANTS_HIDDEN: tl.constexpr,
    WANTS_PROBS: tl.constexpr,
    HAS_B2: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group_index = tl.arange(0, GROUPS)
    ends = tl.load(offsets_ptr + group_index, mask=group_index < num_groups, other=2147483647)
    group = tl.sum((ends <= row).to(tl.int32), 0)
    slot = tl.load(permutation_ptr + row)
    if group >= num_groups:
        if WANTS_PROBS:
            tl.store(dprobs_ptr + slot, 0.0)
        return
    scale = tl.load(scale_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, inner, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = c < inner
        d = tl.load(d_ptr + row * inner + c, mask=mask, other=0.0).to(tl.float32)
        if GATE == "none":
            z = tl.load(z_ptr + row * width + c, mask=mask, other=0.0).to(tl.float32)
            value, slope = act_both(z, ACTIVATION, dz_ptr.dtype.element_ty)
            if WANTS_GRAD:
                dz = with_slope(d * scale, slope, z, ACTIVATION)
                tl.store(dz_ptr + row * width + c, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        else:
            if GATE == "halves":
                gate_col = c
                up_col = inner + c
            else:
                gate_col = 2 * c
                up_col = 2 * c + 1
            z_row = z_ptr + row * width
            gate = tl.load(z_row + gate_col, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(z_row + up_col, mask=mask, other=0.0).to(tl.float32)
            value, dgate, dup = _gated_gradients(
                d * scale, gate, up, ACTIVATION, dz_ptr.dtype.element_ty
            )
            if WANTS_GRAD:
                dz_row = dz_ptr + row * width
                tl.store(dz_row + gate_col, dgate.to(dz_ptr.dtype.element_ty), mask=mask)
                tl.store(dz_row + up_col, dup.to(dz_ptr.dtype.element_ty), mask=mask)
        if WANTS_HIDDEN:
            hidden = (value * scale).to(hidden_ptr.dtype.element_ty)
            tl.store(hidden_ptr + row * inner + c, hidden, mask=mask)
        if WANTS_PROBS:
            total += tl.where(mask, d * value, 0.0)
    if WANTS_PROBS:
        if HAS_B2:
            dy_row = dy_ptr + tl.load(rows_ptr + row).to(tl.int64) * out_size
            b2_row = b2_ptr + group.to(tl.int64) * out_size
            for first in range(0, out_size, BLOCK):
                c = first + tl.arange(0, BLOCK)
                mask = c < out_size
                dy = tl.load(dy_row + c, mask=mask, other=0.0).to(tl.float32)
                total += dy * tl.load(b2_row + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(dprobs_ptr + slot, tl.sum(total, 0))


def supports(*args: Any) -> str | None:
    call = MoeArguments(*args)
    return _supports_groups(call.input, call.w1)


def supports_backward(*args: Any) -> str | None:
    _, call, _, _ = of_backward(MoeArguments, args)
    return supports(*call)


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = MoeArguments(*args)
    input, probs, permutation, positions, offsets, w1, w2, b1, b2, *_ = call
    gate = _gate(call)
    tokens, scale = _rows_of(probs, permutation)
    num_rows, num_groups = permutation.shape[0], w1.shape[0]
    width, inner = w1.shape[2], w2.shape[1]
    kept = input.new_empty(num_rows if call.keep_preactivation else 0, width)
    hidden = input.new_empty(num_rows, inner)
    if num_rows == 0:
        return input.new_zeros(positions.shape[0], w2.shape[2]), kept
    if hidden.numel() > 0:
        rows_per_group = num_rows // num_groups
        mma_sync = _products.uses_mma_sync(input.device)
        blocks, options = _blocks(input.dtype, rows_per_group, gate, mma_sync=mma_sync)
        row_tiles = _grouped.row_tiles_of(num_rows, num_groups, blocks["BLOCK_M"])
        columns = blocks["BLOCK_N"] // 2 if gate == "halves" else blocks["BLOCK_N"]
        tma_mode, (_, weight) = _products.tma_operands(blocks, columns, input, w1.mT, gathers=True)
        operands = (input, tokens, scale, w1 if tma_mode == "none" else weight)
        tensors = (*operands, _launch.dense(b1, input), offsets.contiguous())
        targets = (kept if call.keep_preactivation else hidden, hidden)
        sizes = (num_rows, row_tiles, num_groups, width, inner, input.shape[1])
        strides = (*input.stride(), *w1.stride())
        flags = {"HAS_BIAS": b1 is not None, "KEEPS": call.keep_preactivation, "GATE": gate}
        flags |= {"ACTIVATION": call.activation, "PRECISION": _launch.precision(input.dtype)}
        flags |= {"TMA_MODE": tma_mode, "GROUPS": _grouped.groups_block(num_groups)}
        with _launch.device_of(input):
            _expert_kernel[(row_tiles * triton.cdiv(width, blocks["BLOCK_N"]),)](
                *tensors, *targets, *sizes, *strides, **flags, GROUP_M=GROUP_M, **blocks, **options
            )
    output, _ = _grouped.product(hidden, w2, offsets, b2, scale=scale)
    return _moe_rows.combine(output, None, positions, offsets), kept


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad,), call, (preactivation,), output_mask = of_backward(MoeArguments, args)
    return gradients(grad, call, preactivation, output_mask)


def gradients(
    grad_output: torch.Tensor,
    call: MoeArguments,
    preactivation: torch.Tensor,
    output_mask: Sequence[bool],
    into: Sequence[torch.Tensor | None] = (None,) * 4,
) -> tuple[torch.Tensor | None, ...]:
    """Return those that are asked for; w1's, w2's, b1's and b2's are added to what is given."""
    input, probs, permutation, positions, offsets, w1, w2, b1, b2, *_ = call
    into_w1, into_w2, into_b1, into_b2 = into
    wants_input, wants_probs, wants_w1, wants_w2, wants_b1, wants_b2 = output_mask
    tokens, scale = _rows_of(probs, permutation)
    num_rows, width, inner = permutation.shape[0], w1.shape[2], w2.shape[1]
    dy = grad_output.contiguous()
    dx = dprobs = dw1 = dw2 = db1 = db2 = None
    wants_grad = wants_input or wants_w1 or wants_b1
    if wants_grad or wants_probs or wants_w2:
        kept = preactivation
        if not call.keep_preactivation:
            kept, _ = _grouped.product(input, w1, offsets, b1, rows=tokens)
        # Unrounded: the gradient of a probability is a sum over it that may cancel.
        d, _ = _grouped.product(dy, w2.mT, offsets, rows=tokens, dtype=torch.float32)
        dz = torch.empty_like(kept) if wants_grad else kept
        hidden = kept.new_empty(d.shape) if wants_w2 else kept
        dprobs = probs.new_empty(probs.shape) if wants_probs else None
        if num_rows > 0:
            lists = (permutation.contiguous(), tokens, offsets.contiguous())
            tensors = (d, kept, scale, *lists, dy, _launch.dense(b2, dy))
            targets = (dz, hidden, scale if dprobs is None else dprobs)
            sizes = (w1.shape[0], width, inner, dy.shape[1])
            flags = {"GATE": _gate(call), "ACTIVATION": call.activation, "HAS_B2": b2 is not None}
            flags |= {"WANTS_GRAD": wants_grad, "WANTS_HIDDEN": wants_w2}
            flags |= {"WANTS_PROBS": wants_probs, "GROUPS": _grouped.groups_block(w1.shape[0])}
            with _launch.device_of(dy):
                _pass_kernel[(num_rows,)](
                    *tensors, *targets, *sizes, **flags, **_PASS_BLOCK, **_launch.FOUR_WARPS
                )
        if wants_w2:
            dw2 = _grouped.weight_gradient(hidden, dy, offsets, w2, into=into_w2, dy_rows=tokens)
        if wants_w1:
            dw1 = _grouped.weight_gradient(input, dz, offsets, w1, into=into_w1, x_rows=tokens)
        if wants_b1:
            db1 = _grouped.row_sums(dz, offsets, into=into_b1)
        if wants_input:
            grads, _ = _grouped.product(dz, w1.mT, offsets)
            dx = _moe_rows.combine(grads, None, positions, offsets)
    if wants_b2:
        db2 = _grouped.row_sums(dy, offsets, into=into_b2, rows=tokens, scale=scale)
    return dx, dprobs, dw1, dw2, db1, db2


def _rows_of(probs: torch.Tensor, permutation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token (int32) and probability of each row."""
    slots = permutation.contiguous()
    tokens = torch.div(slots, max(1, probs.shape[1]), rounding_mode="floor")
    return tokens, probs.flatten().index_select(0, slots)


def _blocks(dtype: torch.dtype, num_rows: int, gate: str, *, mma_sync: bool) -> _launch.Tiling:
    """Return tile sizes and launch options; taking pairs apart needs registers of its own.

    With three stages of 128 x 128 two blocks fit a multiprocessor. With ``mma_sync`` float32 with
    three stages spills under Triton 3.6 in one part, and under 3.9 in four.
    """
    blocks, options = _products.blocks_of(dtype, num_rows, mma_sync=mma_sync)
    if blocks["EPILOGUE_PARTS"] > 1 and gate != "none":
        blocks = blocks | {"EPILOGUE_PARTS": 4}  # of half the columns
    if gate == "pairs" and dtype != torch.float32:
        blocks = blocks | {"BLOCK_N": 128, "EPILOGUE_PARTS": 4}
        if num_rows > 64 and not mma_sync:
            options = options | {"num_stages": 3}
    elif gate == "pairs" and mma_sync:
        blocks, options = blocks | {"EPILOGUE_PARTS": 4}, options | {"num_stages": 2}
    return blocks, options


def _gate(call: MoeArguments) -> str:
    if not call.gated:
        return "none"
    return "pairs" if call.interleaved else "halves"
