"""A tensor that all ranks of a group hold alike, kept as one part on each."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core.collectives import all_gather_single
from fusedops.memory.saved_tensors import Pack, Rematerialized, take


class Slice(Rematerialized):
    """This rank's part of a contiguous tensor; the others' are gathered when it is asked for."""

    def __init__(self, tensor: torch.Tensor, group: Any, pack: Pack) -> None:
        super().__init__()
        self._group, self._shape = group, tensor.shape
        size = group.size()
        length = -(-tensor.numel() // size)
        part = tensor.new_zeros(length)
        mine = tensor.detach().reshape(-1)[group.rank() * length :][:length]
        part[: mine.numel()] = mine
        self._part = pack(part)

    def make(self) -> torch.Tensor:
        """Return the tensor, in a collective of the group."""
        part = take(self._part)
        gathered = part.new_empty(self._group.size() * part.numel())
        all_gather_single(gathered, part, group=self._group)
        return gathered[: self._shape.numel()].view(self._shape)


def worth_slicing(tensor: torch.Tensor, group: Any) -> bool:
    """Return whether a tensor can be sliced, and is large enough to have a part on each rank."""
    return (
        tensor.dtype.is_floating_point
        and tensor.is_contiguous()
        and tensor.numel() >= group.size() > 1
    )
