"""Kernels over lists of tensors: one launch, whose programs find their tensor in a table.

A row of the table is a tensor: its address in int64. Programs are dealt out by a second table of
(tensor, block of it) pairs, which depends on sizes alone and is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

BLOCK = 1024  # elements of a program


def addresses(*lists: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int64 ``[tensors, lists]`` on the host; 0 where a list is empty."""
    count = len(lists[0])
    columns = [[each.data_ptr() for each in tensors] or [0] * count for tensors in lists]
    return torch.tensor(columns, dtype=torch.int64).t().contiguous()


def vectorizes(*tensors: torch.Tensor) -> bool:
    """Whether a tensor, and others of its size, may be read by vectors of 16 bytes to the end."""
    return all(each.data_ptr() % 16 == 0 and each.numel() % 16 == 0 for each in tensors)


@functools.lru_cache(maxsize=64)
def blocks(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int32 ``[programs, 2]``: for each program its tensor and its block of it."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    block = torch.arange(int(counts.sum())) - first[tensor]
    return torch.stack([tensor, block], dim=1).to(torch.int32).to(device)
