"""The processes that generate together: some have prompts of their own, all have the result.

Prompts are divided over ``dp x cp``. Ranks of ``tp`` share every row and choose the same. The last
stage of a pipeline chooses and tells the others. Experts are spread over ranks with other prompts,
which therefore call the model equally often: who has nothing to go on with computes padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from fusedops.models.parallelization.engine import TrainEngine


class Shares:
    """Which prompts are whose, and who tells what to whom.

    Args:
        engine: of the model.
        count: of the prompts.
        device: of the model.

    Attributes:
        chooses: whether this rank gets logits: with a pipeline, the last stage's.
    """

    def __init__(self, engine: TrainEngine, count: int, device: torch.device) -> None:
        ranks = engine.config.sizes.data if engine.mesh is not None else 1
        self._group = engine.group("data") if ranks > 1 else None
        self._each = -(-count // ranks)
        self._count, self._device = count, device
        self._rank = 0 if engine.mesh is None else engine.mesh.rank("data")
        self._stages = engine.group("pp") if engine.pipeline is not None else None
        self._last = 0
        if engine.pipeline is not None:
            order = engine.pipeline.driver.table
            self._last = order.rank_of(order.stages - 1)
        self.chooses = self._stages is None or self._stages.rank() == self._last

    @property
    def mine(self) -> range:
        """Prompts of this rank."""
        first = min(self._count, self._rank * self._each)
        return range(first, min(self._count, first + self._each))

    def of_last(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the last stage has chosen; other ranks give something of the same shape."""
        if self._stages is None or not chosen.numel():
            return chosen
        from fusedops.parallel.comm import collectives

        return collectives.broadcast(
            chosen.contiguous(), self._stages, source=self._last, label="chosen"
        ).wait()

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
        from fusedops.parallel.comm import collectives

        first = self._rank * self._each * size
        part = torch.full((self._each * size,), -1, dtype=torch.int64, device=self._device)
        part[[each - first for each in numbers]] = values
        whole = collectives.all_gather(part, self._group, label="tokens").wait()
        return whole.tolist()[: self._count * size]

    def any(self, value: bool) -> bool:
        """Whether it is true of a rank."""
        if self._group is None:
            return value
        from fusedops.parallel.comm import collectives

        told = torch.tensor([int(value)], device=self._device)
        return bool(collectives.all_reduce(told, self._group, label="unfinished").wait())

    def gather(self, values: list[Any]) -> list[Any]:
        """Return the values of all ranks, in the order of their prompts."""
        if self._group is None:
            return values
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, values, group=self._group)
        return [each for of_rank in found for each in of_rank]
