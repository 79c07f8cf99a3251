"""linear_glu in Triton: one kernel makes the tiles of both products and multiplies them.

Forward: half of a program's tile is the gate and half the other product, of the same rows and
columns, and the input is read once; sums are float32. The only other results written
are the two pre-activations, if they are saved.

Backward: swiglu's pass makes the gradients of both pre-activations. The products are then plain and
go to torch's own matmul (cuBLAS); the second of the input's gradient accumulates on the first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fusedops._core.layouts import as_matrix
from fusedops.kernels import _glu, _launch, _products
from fusedops.kernels._device import act_value, split
from fusedops.kernels._products import load_weights, tile_of
from fusedops.kernels.linear_act import weight_gradient


@triton.jit
def _forward_kernel(
    x_ptr,
    gate_weight_ptr,
    up_weight_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    num_rows,
    num_cols,
    depth,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    KEEPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_MODE: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    row_tile, col_tile = tile_of(tl.program_id(0), num_rows, num_cols, GROUP_M, BLOCK_M, HALF)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # Two products of half the width. By pointers one would do, of a tile whose columns are of
    # either weight, but Triton 3.8 does not know what divides a pointer that was selected: it loads
    # two bytes at a time, and spills.
    gate_sum = tl.zeros((BLOCK_M, HALF), tl.float32)
    up_sum = tl.zeros((BLOCK_M, HALF), tl.float32)
    if TMA_MODE == "none":
        col = col_tile * HALF + tl.arange(0, HALF)
        k = tl.arange(0, BLOCK_K)
        # Rows past the edge read row 0: loads need a mask along k only.
        row_read = tl.where(row < num_rows, row, 0).to(tl.int64)
        col_read = tl.where(col < num_cols, col, 0).to(tl.int64)
        x_ptrs = x_ptr + row_read[:, None] * stride_xm + k[None, :] * stride_xk
        inside = col_read[None, :] * stride_wn + k[:, None] * stride_wk
        for first in range(0, depth, BLOCK_K):
            exists = k < depth - first
            x = tl.load(x_ptrs, mask=exists[None, :], other=0.0)
            gate_weight = tl.load(gate_weight_ptr + inside, mask=exists[:, None], other=0.0)
            up_weight = tl.load(up_weight_ptr + inside, mask=exists[:, None], other=0.0)
            gate_sum = tl.dot(x, gate_weight, gate_sum, input_precision=PRECISION)
            up_sum = tl.dot(x, up_weight, up_sum, input_precision=PRECISION)
            x_ptrs += BLOCK_K * stride_xk
            inside += BLOCK_K * stride_wk
    else:
        col = col_tile * HALF
        for first in range(0, depth, BLOCK_K):
            x = x_ptr.load([row_tile * BLOCK_M, first])
            gate_weight = load_weights(gate_weight_ptr, None, first, col, TMA_MODE, BLOCK_K, HALF)
            up_weight = load_weights(up_weight_ptr, None, first, col, TMA_MODE, BLOCK_K, HALF)
            gate_sum = tl.dot(x, gate_weight, gate_sum, input_precision=PRECISION)
            up_sum = tl.dot(x, up_weight, up_sum, input_precision=PRECISION)
    # The tile is finished in parts: all of it at once would not leave registers for the epilogue.
    corner = row_tile.to(tl.int64) * BLOCK_M * num_cols
    PART: tl.constexpr = HALF // EPILOGUE_PARTS
    gates = split(gate_sum, BLOCK_M, HALF, EPILOGUE_PARTS)
    ups = split(up_sum, BLOCK_M, HALF, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        gate, up = gates[part], ups[part]
        part_col = col_tile * HALF + part * PART + tl.arange(0, PART)
        mask = (row < num_rows)[:, None] & (part_col < num_cols)[None, :]
        offset = tl.arange(0, BLOCK_M)[:, None] * num_cols + part_col[None, :]
        if KEEPS:
            tl.store(gate_ptr + corner + offset, gate.to(gate_ptr.dtype.element_ty), mask=mask)
            tl.store(up_ptr + corner + offset, up.to(up_ptr.dtype.element_ty), mask=mask)
        y = act_value(gate, ACTIVATION, y_ptr.dtype.element_ty) * up
        tl.store(y_ptr + corner + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    input, gate_weight, up_weight, activation, limit, keep_preactivations = args
    if limit != 0:
        return _bounded_forward(*args)
    shape = (*input.shape[:-1], gate_weight.shape[0])
    kept = shape if keep_preactivations else (0,)
    output, gate, up = input.new_empty(shape), input.new_empty(kept), input.new_empty(kept)
    if output.numel() == 0:
        return output, gate, up
    if gate_weight.stride() != up_weight.stride():
        gate_weight, up_weight = gate_weight.contiguous(), up_weight.contiguous()
    x = as_matrix(input)
    num_rows, depth = x.shape
    num_cols = gate_weight.shape[0]
    blocks, options = _blocks(x.dtype, num_rows, mma_sync=_products.uses_mma_sync(x.device))
    col_tiles = triton.cdiv(2 * num_cols, blocks["BLOCK_N"])
    tiles = triton.cdiv(num_rows, blocks["BLOCK_M"]) * col_tiles
    columns = blocks["BLOCK_N"] // 2
    tma_mode, operands = _products.tma_operands(blocks, columns, x, gate_weight, up_weight)
    targets = (gate, up, output) if keep_preactivations else (output, output, output)
    sizes = (num_rows, num_cols, depth, *x.stride(), *gate_weight.stride())
    flags = {"KEEPS": keep_preactivations, "ACTIVATION": activation, "TMA_MODE": tma_mode}
    flags |= {"PRECISION": _launch.precision(input.dtype)}
    flags |= {"GROUP_M": _products.group_of(num_rows, blocks)}
    with _launch.device_of(x):
        _forward_kernel[(tiles,)](*operands, *targets, *sizes, **flags, **blocks, **options)
    return output, gate, up


def _bounded(
    gate: torch.Tensor, up: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return (gate, up) if limit == 0 else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _bounded_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same with bounds: torch's products, which are rounded, and swiglu's pass."""
    input, gate_weight, up_weight, activation, limit, keep_preactivations = args
    gate, up = F.linear(input, gate_weight), F.linear(input, up_weight)
    output = _glu.forward(*_bounded(gate, up, limit), activation)
    empty = input.new_empty(0)
    return output, gate if keep_preactivations else empty, up if keep_preactivations else empty


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, gate_weight, up_weight, gate, up, *options, output_mask = args
    activation, limit, _ = options
    if gate.numel() != grad_output.numel():
        _, gate, up = forward(input, gate_weight, up_weight, activation, limit, True)
    dy, x = as_matrix(grad_output.contiguous()), as_matrix(input)
    wants_input, wants_gate_weight, wants_up_weight = output_mask
    wanted = (wants_input or wants_gate_weight, wants_input or wants_up_weight)
    matrices = (gate.reshape(dy.shape), up.reshape(dy.shape))
    inner = _bounded(*matrices, limit)
    gradients: Any = _glu.backward(dy, *inner, wanted, activation=activation)
    dgate, dup = gradients
    if limit != 0:  # 0 also of NaN, as the gradient of torch's clamp
        dgate = None if dgate is None else torch.where(matrices[0] <= limit, dgate, 0.0)
        dup = None if dup is None else torch.where(matrices[1].abs() <= limit, dup, 0.0)
    grad_input = None
    if wants_input:
        grad_input = torch.addmm(dgate @ gate_weight, dup, up_weight).reshape(input.shape)
    return (
        grad_input,
        weight_gradient(dgate, x, gate_weight) if wants_gate_weight else None,
        weight_gradient(dup, x, up_weight) if wants_up_weight else None,
    )


def _blocks(dtype: torch.dtype, num_rows: int, *, mma_sync: bool) -> _launch.Tiling:
    """Return linear_act's tile sizes and options, but where they would spill.

    That is float32 in steps of 32, and with ``mma_sync`` two sums of 128 x 128, and float32 with
    three stages (Triton 3.8).
    """
    blocks, options = _products.blocks_of(dtype, num_rows, mma_sync=mma_sync)
    if dtype == torch.float32:
        return blocks | {"BLOCK_K": 16}, options | ({"num_stages": 2} if mma_sync else {})
    if mma_sync and num_rows > 64:
        return blocks | {"BLOCK_N": 128, "EPILOGUE_PARTS": 1}, options | {"num_warps": 4}
    return blocks | ({"EPILOGUE_PARTS": 4} if num_rows > 64 else {}), options
