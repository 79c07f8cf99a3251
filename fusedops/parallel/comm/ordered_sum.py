"""Sums whose bits depend neither on the backend nor on how a tensor is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core import dtypes


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors in the accumulation dtype, rounded once.

    Neighbours are added first, then pairs of them, and so on: a rank that has added 2, 4 or 8
    neighbours beforehand has a part of this sum, and gets the same bits.
    """
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    wide = dtypes.statistics_dtype(dtype)
    sums: list[tuple[int, torch.Tensor]] = []  # number of neighbours in each, decreasing
    for part in parts:
        size = 1
        while sums and sums[-1][0] == size:
            before = sums.pop()[1]
            part = before.to(wide) + part if size == 1 else before.add_(part)
            size *= 2
        sums.append((size, part))
    total = sums[0][1]
    for _, part in sums[1:]:
        total += part
    return total.to(dtype)
