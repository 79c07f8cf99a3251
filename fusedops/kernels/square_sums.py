"""The sums of squares of many tensors in Triton: one launch, then one that adds up each tensor's.

A program squares and sums one block in float64, in which no square of a float32 overflows; a second
kernel adds each tensor's parts in an order of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch, _pointer_table
from fusedops.kernels._pointer_table import BLOCK

_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}


@triton.jit
def _parts_kernel(
    table_ptr, blocks_ptr, parts_ptr, input_ptr, VECTORIZES: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program).to(tl.int64)
    block = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64)
    data = tl.load(table_ptr + 2 * tensor).to(input_ptr.dtype)
    if VECTORIZES:
        data = tl.multiple_of(data, 16)
    size = tl.load(table_ptr + 2 * tensor + 1)
    if VECTORIZES:
        size = tl.multiple_of(size, 16)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(data + i, mask=i < size, other=0.0).to(tl.float64)
    tl.store(parts_ptr + program, tl.sum(x * x, axis=0))


@triton.jit
def _sums_kernel(parts_ptr, first_ptr, sums_ptr, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    first, last = tl.load(first_ptr + tensor), tl.load(first_ptr + tensor + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(parts_ptr + i, mask=i < last, other=0.0)
    tl.store(sums_ptr + tensor, tl.sum(total, axis=0))


def forward(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Launch it; argument and result are those of ``fusedops::square_sums``."""
    device = inputs[0].device
    sums = torch.zeros(len(inputs), dtype=torch.float64, device=device)
    dense = [each.contiguous() for each in inputs]
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, each in enumerate(dense):
        if each.numel() > 0:
            kinds.setdefault((each.dtype, _pointer_table.vectorizes(each)), []).append(i)
    for (_, vectorizes), members in kinds.items():
        chosen = [dense[i] for i in members]
        sizes = tuple(each.numel() for each in chosen)
        table = torch.cat(
            [_pointer_table.addresses(chosen), torch.tensor(sizes).unsqueeze(1)], dim=1
        )
        blocks = _pointer_table.blocks(sizes, device)
        parts = torch.empty(len(blocks), dtype=torch.float64, device=device)
        counts = torch.tensor([0, *(triton.cdiv(size, BLOCK) for size in sizes)])
        summed = torch.empty(len(chosen), dtype=torch.float64, device=device)
        with _launch.device_of(chosen[0]):
            _parts_kernel[(len(blocks),)](
                table.to(device, non_blocking=True),
                blocks,
                parts,
                chosen[0],
                VECTORIZES=vectorizes,
                BLOCK=BLOCK,
                **_OPTIONS,
            )
            first = counts.cumsum(0).to(torch.int32).to(device, non_blocking=True)
            _sums_kernel[(len(chosen),)](parts, first, summed, BLOCK=BLOCK, **_OPTIONS)
        sums[torch.tensor(members, device=device)] = summed
    return sums


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    types = {"table_ptr": "*i64", "blocks_ptr": "*i32", "parts_ptr": "*fp64", "sums_ptr": "*fp64"}
    types |= {"input_ptr": "*bf16", "first_ptr": "*i32"}
    return [
        _launch.report_case(_parts_kernel, types, {"VECTORIZES": True, "BLOCK": BLOCK}, _OPTIONS),
        _launch.report_case(_sums_kernel, types, {"BLOCK": BLOCK}, _OPTIONS),
    ]
