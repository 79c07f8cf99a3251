"""The processes that generate together: ranks have prompts of their own, all get the results.

Prompts are sharded over ``dp x cp``. Ranks of ``tp`` have the same rows and choose the same tokens.
The last stage of a pipeline chooses and broadcasts. Experts are on ranks with other prompts, which
therefore call the model equally often: a rank whose sequences have ended computes padding.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from fusedops._core.device_tensors import device_tensor
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.parallel.collective_errors import gather_objects
from fusedops.parallel.comm import collectives


class BatchShard:
    """The prompts of this rank, and the communication of what ranks choose.

    Args:
        engine: of the model.
        num_prompts: on all ranks.
        device: of the model.

    Attributes:
        prompts: numbers of the prompts of this rank.
        chooses: whether this rank gets logits: with a pipeline, the last stage's.
    """

    def __init__(self, engine: TrainEngine, num_prompts: int, device: torch.device) -> None:
        ranks = engine.config.sizes.data if engine.mesh is not None else 1
        self._group = engine.group("data") if ranks > 1 else None
        self._per_rank, self._device = -(-num_prompts // ranks), device
        self._rank = 0 if engine.mesh is None else engine.mesh.rank("data")
        first = self._rank * self._per_rank
        self.prompts = range(num_prompts)[first : first + self._per_rank]
        self._stages, self._last = None, 0
        if engine.pipeline is not None:
            self._stages, order = engine.group("pp"), engine.pipeline.driver.table
            self._last = order.rank_of(order.stages - 1)
        self.chooses = self._stages is None or self._stages.rank() == self._last

    def from_last_stage(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the last stage chose; other ranks pass a tensor of the same shape."""
        if self._stages is None or not chosen.numel():
            return chosen
        return collectives.broadcast(
            chosen.contiguous(), self._stages, source=self._last, label="chosen"
        ).wait()

    def gather_tokens(
        self, tokens: torch.Tensor, sequences: list[int], samples: int
    ) -> dict[int, int]:
        """Return the tokens of the unfinished sequences of all ranks, and any number of others.

        This rank's ``tokens`` are those of ``sequences``, of which each prompt has ``samples``.
        """
        if self._group is None:
            return dict(zip(sequences, tokens.tolist(), strict=True))
        count = self._per_rank * samples
        shard = torch.full((count,), -1, dtype=torch.int64, device=self._device)
        shard[[sequence - self._rank * count for sequence in sequences]] = tokens
        shards = collectives.all_gather(shard, self._group, label="tokens").wait()
        return dict(enumerate(shards.tolist()))

    def any(self, value: bool) -> bool:
        """Return whether the value is true on any rank."""
        if self._group is None:
            return value
        count = device_tensor([int(value)], torch.int64, self._device)
        return bool(collectives.all_reduce(count, self._group, label="unfinished").wait())

    def gather(self, values: list[Any]) -> list[Any]:
        """Return the values of all ranks, in the order of their prompts."""
        return list(chain.from_iterable(gather_objects(values, self._group)))
