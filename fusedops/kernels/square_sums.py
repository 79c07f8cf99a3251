"""The sums of squares of many tensors in Triton: one launch, then one that adds up each tensor's.

A program squares and sums one block in float64, in which no square of a float32 overflows; a second
kernel adds each tensor's parts in an order that does not depend on other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch, _pointer_table
from fusedops.kernels._pointer_table import BLOCK

_COLUMNS = 4


@triton.jit
def _parts_kernel(
    table_ptr,
    blocks_ptr,
    parts_ptr,
    input_ptr,
    VECTORIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program).to(tl.int64)
    block = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64)
    data = tl.load(table_ptr + COLUMNS * tensor).to(input_ptr.dtype)
    if VECTORIZES:
        data = tl.multiple_of(data, 16)
    size = tl.load(table_ptr + COLUMNS * tensor + 1)
    if VECTORIZES:
        size = tl.multiple_of(size, 16)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(data + i, mask=i < size, other=0.0).to(tl.float64)
    tl.store(parts_ptr + program, tl.sum(x * x, axis=0))


@triton.jit
def _sums_kernel(table_ptr, parts_ptr, sums_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = table_ptr + COLUMNS * tl.program_id(0)
    size, place = tl.load(row + 1), tl.load(row + 2)
    first = tl.load(row + 3).to(tl.int32)
    last = first + tl.cdiv(size, BLOCK).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(parts_ptr + i, mask=i < last, other=0.0)
    tl.store(sums_ptr + place, tl.sum(total, axis=0))


@dataclass
class SumsLaunch:
    """The two launches for the tensors of one dtype."""

    # Of each tensor its address, size, place in the result, and the number of its first part
    table: _pointer_table.PointerTable
    dtype: torch.dtype  # of all
    vectorizes: bool  # whether all may be read by vectors to the end

    def move(self, addresses: torch.Tensor) -> None:
        """Take the addresses of all tensors of the call."""
        self.table.set_column(0, addresses[self.table.rows[:, 2]])

    def run(self, sums: torch.Tensor) -> None:
        """Launch; write the sums of these tensors to their places in ``sums``."""
        with _launch.guard(sums.device):
            table, blocks = self.table.on_device()
            parts = torch.empty(len(blocks), dtype=torch.float64, device=sums.device)
            launch = {"COLUMNS": _COLUMNS, "BLOCK": BLOCK} | _launch.FOUR_WARPS
            if len(blocks) > 0:
                of_dtype = _pointer_table.of_dtype(self.dtype, sums.device)
                _parts_kernel[(len(blocks),)](
                    table, blocks, parts, of_dtype, VECTORIZES=self.vectorizes, **launch
                )
            _sums_kernel[(len(table),)](table, parts, sums, **launch)


def launches(inputs: Sequence[torch.Tensor]) -> list[SumsLaunch]:
    """Return the launches for dense tensors."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, tensor in enumerate(inputs):
        kinds.setdefault((tensor.dtype, _pointer_table.vectorizes(tensor)), []).append(i)
    made = []
    for (dtype, vectorizes), members in kinds.items():
        chosen = [inputs[i] for i in members]
        sizes = tuple(tensor.numel() for tensor in chosen)
        parts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
        columns = [torch.tensor(sizes), torch.tensor(members), parts.cumsum(0) - parts]
        rows = torch.stack([_pointer_table.addresses(chosen)[:, 0], *columns], dim=1)
        table = _pointer_table.PointerTable(rows, sizes, chosen[0].device)
        made.append(SumsLaunch(table, dtype, vectorizes))
    return made


def forward(inputs: list[torch.Tensor]) -> torch.Tensor:
    dense = [tensor.contiguous() for tensor in inputs]
    sums = torch.empty(len(inputs), dtype=torch.float64, device=inputs[0].device)
    for launch in launches(dense):
        launch.run(sums)
    return sums
