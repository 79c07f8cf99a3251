"""moe_unpack in Triton: one program per row; float8 codes widened by integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedops._core import dtypes
from fusedops.kernels import _launch

_MAX_BLOCK = 2048


@triton.jit
def _unpack_kernel(bytes_ptr, words_ptr, y_ptr, num_cols, scale_at, stride, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(words_ptr + (row * stride + scale_at) // 4).to(tl.float32, bitcast=True)
    for first in range(0, num_cols, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        inside = col < num_cols
        code = tl.load(bytes_ptr + row * stride + col, mask=inside, other=0).to(tl.int32)
        magnitude = code & 0x7F
        normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = tl.where((code & 0x80) != 0, -value, value) * scale
        tl.store(y_ptr + row * num_cols + col, value.to(y_ptr.dtype.element_ty), mask=inside)


def forward(payload: torch.Tensor, like: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    packed = payload.contiguous()
    num_cols = like.shape[-1]
    rows = like.new_empty((packed.shape[0], num_cols))
    if rows.numel() == 0:
        return rows
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_cols))
    tensors = (packed, dtypes.bits(packed, torch.int32), rows)
    with _launch.device_of(packed):
        _unpack_kernel[(packed.shape[0],)](
            *tensors, num_cols, *layout[2:], BLOCK_N=block, **_launch.row_options(block)
        )
    return rows
