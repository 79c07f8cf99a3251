"""moe_relayout in Triton: a gather of rows, zeros where the index is negative, both ways."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch, _moe_rows

# Eight to sixteen elements a thread.
_BLOCK = 1024


@triton.jit
def _gather_kernel(x_ptr, y_ptr, index_ptr, stride_x, num_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index_ptr + row).to(tl.int64)
    mask = (col < num_cols) & (source >= 0)
    x = tl.load(x_ptr + source * stride_x + col, mask=mask, other=0.0)
    tl.store(y_ptr + row * num_cols + col, x, mask=col < num_cols)


def forward(input: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    x = _moe_rows.with_dense_rows(input)
    num_rows, num_cols = index.shape[0], x.shape[1]
    output = x.new_empty(num_rows, num_cols)
    if output.numel() == 0:
        return output
    with _launch.device_of(x):
        _gather_kernel[(num_rows, triton.cdiv(num_cols, _BLOCK))](
            x, output, index.contiguous(), x.stride(0), num_cols, BLOCK=_BLOCK, **_launch.FOUR_WARPS
        )
    return output


def backward(*args: Any) -> torch.Tensor | None:
    grad_output, index, inverse, output_mask = args
    return forward(grad_output, inverse, index) if output_mask[0] else None
