"""The processes that generate together: each of ``dp`` has prompts of its own, all have the result.

Ranks of ``tp`` share every row: they get the same logits, and choose the same. Experts are spread
over ``dp``, so that its ranks call the model equally often: who has nothing to go on with computes
padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from fusedops.models import parallelized


class Shares:
    """Which prompts are whose.

    Args:
        model: ``parallelize`` made it, or one process has it alone.
        count: of the prompts.
        device: of the model.
    """

    def __init__(self, model: Any, count: int, device: torch.device) -> None:
        found = parallelized(model)
        self._group = found.group("dp") if found.data_ranks > 1 else None
        self._each = -(-count // found.data_ranks)
        self._count, self._rank, self._device = count, found.data_rank, device

    @property
    def mine(self) -> range:
        """Prompts of this rank."""
        first = min(self._count, self._rank * self._each)
        return range(first, min(self._count, first + self._each))

    def join(self, values: torch.Tensor, numbers: list[int], size: int) -> list[int]:
        """Return a number of each sequence of all ranks, -1 where there is none.

        Args:
            values: those of some sequences of this rank, int64.
            numbers: which sequences these are.
            size: sequences of a prompt.
        """
        told = values.tolist()
        if self._group is None:
            found = [-1] * (self._count * size)
            for number, value in zip(numbers, told, strict=True):
                found[number] = value
            return found
        from fusedops.parallel import communication

        first = self._rank * self._each * size
        part = torch.full((self._each * size,), -1, dtype=torch.int64, device=self._device)
        part[[each - first for each in numbers]] = values
        whole = communication.all_gather(part, self._group, label="tokens").wait()
        return whole.tolist()[: self._count * size]

    def any(self, value: bool) -> bool:
        """Whether it is true of a rank."""
        if self._group is None:
            return value
        from fusedops.parallel import communication

        told = torch.tensor([int(value)], device=self._device)
        return bool(communication.all_reduce(told, self._group, label="unfinished").wait())

    def gather(self, values: list[Any]) -> list[Any]:
        """Return the values of all ranks, in the order of their prompts."""
        if self._group is None:
            return values
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, values, group=self._group)
        return [each for of_rank in found for each in of_rank]
