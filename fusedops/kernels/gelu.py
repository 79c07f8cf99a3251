"""gelu in Triton: forward, backward, launchers. One pass over memory each way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedops._core.activation import GELU_VARIANTS
from fusedops.kernels import _launch
from fusedops.kernels._device import act_slope, act_value

# Eight elements a thread: one 16-byte access in half precision, two in float32.
_BLOCK = 1024
_LAUNCH = {"BLOCK": _BLOCK} | _launch.FOUR_WARPS


@triton.jit
def _forward_kernel(x_ptr, y_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    y = act_value(x, ACTIVATION, y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy_ptr, x_ptr, dx_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dx = dy * act_slope(x, ACTIVATION, dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def forward(input: torch.Tensor, approximate: str) -> torch.Tensor:
    x = input.contiguous()
    output = torch.empty_like(x)
    count = x.numel()
    if count > 0:
        with _launch.device_of(x):
            _forward_kernel[(triton.cdiv(count, _BLOCK),)](
                x, output, count, ACTIVATION=GELU_VARIANTS[approximate], **_LAUNCH
            )
    return output


def backward(
    grad_output: torch.Tensor, input: torch.Tensor, approximate: str, output_mask: Sequence[bool]
) -> torch.Tensor | None:
    if not output_mask[0]:
        return None
    dy, x = grad_output.contiguous(), input.contiguous()
    dx = torch.empty_like(x)
    count = x.numel()
    if count > 0:
        with _launch.device_of(x):
            _backward_kernel[(triton.cdiv(count, _BLOCK),)](
                dy, x, dx, count, ACTIVATION=GELU_VARIANTS[approximate], **_LAUNCH
            )
    return dx
