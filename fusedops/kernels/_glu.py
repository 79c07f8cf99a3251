"""swiglu and geglu in Triton: the kernels and launchers that both share.

One pass over memory each way. Rows of the inputs may be apart (gate and up as the halves of one
tensor); dense tensors come as one long row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._device import act_both, act_value, with_slope

# Eight elements a thread: one 16-byte access in half precision, two in float32.
_BLOCK = 1024
_LAUNCH = {"BLOCK": _BLOCK} | _launch.FOUR_WARPS


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    stride_gate,
    stride_up,
    num_cols,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(num_cols, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < num_cols
    gate = tl.load(gate_ptr + row * stride_gate + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + col, mask=mask, other=0.0).to(tl.float32)
    y = act_value(gate, ACTIVATION, y_ptr.dtype.element_ty) * up
    tl.store(y_ptr + row * num_cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    stride_dy,
    stride_gate,
    stride_up,
    num_cols,
    ACTIVATION: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    WANTS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(num_cols, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < num_cols
    dy = tl.load(dy_ptr + row * stride_dy + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + col, mask=mask, other=0.0).to(tl.float32)
    value, slope = act_both(gate, ACTIVATION, dy_ptr.dtype.element_ty)
    if WANTS_GATE:
        up = tl.load(up_ptr + row * stride_up + col, mask=mask, other=0.0).to(tl.float32)
        dgate = with_slope(dy * up, slope, gate, ACTIVATION)
        tl.store(dgate_ptr + row * num_cols + col, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if WANTS_UP:
        dup = dy * value
        tl.store(dup_ptr + row * num_cols + col, dup.to(dup_ptr.dtype.element_ty), mask=mask)


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Launch the forward of ``act(gate) * up``; names are those of ``_core/activation.py``."""
    output = gate.new_empty(gate.shape)
    if gate.numel() == 0:
        return output
    gate, up = _as_rows(gate, up)
    rows, num_cols = gate.shape
    strides = (gate.stride(0), up.stride(0))
    with _launch.device_of(gate):
        _forward_kernel[(rows * triton.cdiv(num_cols, _BLOCK),)](
            gate, up, output, *strides, num_cols, ACTIVATION=activation, **_LAUNCH
        )
    return output


def backward(*args: Any, activation: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; results are the gradients of ``gate`` and ``up`` or ``None``."""
    grad_output, gate, up, (wants_gate, wants_up) = args
    grad_gate = gate.new_empty(gate.shape) if wants_gate else None
    grad_up = gate.new_empty(gate.shape) if wants_up else None
    if gate.numel() == 0 or not (wants_gate or wants_up):
        return grad_gate, grad_up
    tensors = _as_rows(grad_output, gate, up)
    rows, num_cols = tensors[0].shape
    targets = (gate if grad is None else grad for grad in (grad_gate, grad_up))
    strides = (tensor.stride(0) for tensor in tensors)
    flags = {"ACTIVATION": activation, "WANTS_GATE": wants_gate, "WANTS_UP": wants_up}
    with _launch.device_of(gate):
        _backward_kernel[(rows * triton.cdiv(num_cols, _BLOCK),)](
            *tensors, *targets, *strides, num_cols, **flags, **_LAUNCH
        )
    return grad_gate, grad_up


def _as_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors of one shape as matrices of dense rows, without a copy where possible."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors) or first.dim() == 0:
        return [tensor.reshape(1, -1) for tensor in tensors]
    rows = [tensor.reshape(-1, first.shape[-1]) for tensor in tensors]
    return [row if row.stride(1) == 1 else row.contiguous() for row in rows]
