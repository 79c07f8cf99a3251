"""moe_sort in Triton: a stable counting sort in three launches, without a host sync.

1. Each program counts the ids of a block of slots.
2. A program per expert turns its counts into the rows of that expert before each block.
3. Each program gives the slots of its block their rows: the rows of earlier experts, of earlier
   blocks, and of earlier slots in the block, by a cumulative sum over a block x experts tile.

No atomics: the result does not depend on the order in which programs run. Bucket ``num_experts``
holds what is dropped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch

_BLOCK = 256
_BLOCK_E = 16
_SCAN_BLOCK = 1024


@triton.jit
def _buckets(ids_ptr, kept_ptr, slot, mask, num_experts, HAS_KEPT: tl.constexpr):
    """Return the bucket of each slot; -1 outside the mask."""
    ids = tl.load(ids_ptr + slot, mask=mask, other=0)
    legal = (ids >= 0) & (ids < num_experts)
    if HAS_KEPT:
        legal = legal & (tl.load(kept_ptr + slot, mask=mask, other=0) != 0)
    bucket = tl.where(legal, ids.to(tl.int32), num_experts)
    return tl.where(mask, bucket, -1)


@triton.jit
def _count_kernel(
    ids_ptr,
    kept_ptr,
    before_ptr,
    num_slots,
    num_experts,
    num_blocks,
    HAS_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    bucket = _buckets(ids_ptr, kept_ptr, slot, slot < num_slots, num_experts, HAS_KEPT)
    for first in range(0, num_experts + 1, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        count = tl.sum((bucket[:, None] == expert[None, :]).to(tl.int32), axis=0)
        place = expert.to(tl.int64) * num_blocks + block
        tl.store(before_ptr + place, count, mask=expert <= num_experts)


@triton.jit
def _scan_kernel(before_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    total = 0
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        mask = block < num_blocks
        count = tl.load(before_ptr + expert * num_blocks + block, mask=mask, other=0)
        before = total + tl.cumsum(count, axis=0) - count
        tl.store(before_ptr + expert * num_blocks + block, before, mask=mask)
        total += tl.sum(count, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def _place_kernel(
    ids_ptr,
    kept_ptr,
    before_ptr,
    totals_ptr,
    permutation_ptr,
    positions_ptr,
    counts_ptr,
    offsets_ptr,
    num_slots,
    num_experts,
    num_blocks,
    HAS_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    mask = slot < num_slots
    bucket = _buckets(ids_ptr, kept_ptr, slot, mask, num_experts, HAS_KEPT)
    row = tl.zeros((BLOCK,), tl.int32)
    start = 0
    for first in range(0, num_experts + 1, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        legal = expert <= num_experts
        total = tl.load(totals_ptr + expert, mask=legal, other=0)
        end = start + tl.cumsum(total, axis=0)
        place = expert.to(tl.int64) * num_blocks + block
        begin = end - total + tl.load(before_ptr + place, mask=legal, other=0)
        mine = (bucket[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - 1
        row += tl.sum(mine * (rank + begin[None, :]), axis=1)
        start += tl.sum(total, axis=0)
        if block == 0:
            tl.store(counts_ptr + expert, total, mask=expert < num_experts)
            tl.store(offsets_ptr + expert, end, mask=expert < num_experts)
    tl.store(positions_ptr + slot, row, mask=mask)
    tl.store(permutation_ptr + row, slot, mask=mask)


def forward(
    expert_ids: torch.Tensor, kept: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = expert_ids.contiguous()
    slots = ids.numel()
    permutation = ids.new_empty(slots, dtype=torch.int32)
    positions = ids.new_empty(ids.shape, dtype=torch.int32)
    if slots == 0:
        counts = ids.new_zeros(num_experts, dtype=torch.int32)
        return permutation, positions, counts, counts.clone()
    counts = ids.new_empty(num_experts, dtype=torch.int32)
    results = (permutation, positions, counts, torch.empty_like(counts))
    blocks = triton.cdiv(slots, _BLOCK)
    before = ids.new_empty((num_experts + 1, blocks), dtype=torch.int32)
    totals = ids.new_empty(num_experts + 1, dtype=torch.int32)
    mask = ids if kept is None else kept.contiguous().view(torch.uint8)
    options = _launch.FOUR_WARPS
    constants = {"HAS_KEPT": kept is not None, "BLOCK": _BLOCK, "BLOCK_E": _BLOCK_E} | options
    with _launch.device_of(ids):
        _count_kernel[(blocks,)](ids, mask, before, slots, num_experts, blocks, **constants)
        _scan_kernel[(num_experts + 1,)](before, totals, blocks, BLOCK=_SCAN_BLOCK, **options)
        _place_kernel[(blocks,)](
            ids, mask, before, totals, *results, slots, num_experts, blocks, **constants
        )
    return results
