"""What ``verify`` tries when no other ``parallelize`` is given: ours, on a ``Transformer``.

A mesh's axes are sizes of ``ParallelConfig`` (``dp``, ``cp``, ``tp``, ``pp``), and an option is any
of its other fields; ``arguments`` checks both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops.models import ParallelConfig, TrainEngine, Transformer
from fusedops.models.parallelization.parallelize import parallelize
from fusedops.testing.batches import Batch
from fusedops.testing.case import Case
from fusedops.testing.case_run import Parallel

# AdamW whose first step is no sign: with a small eps it would be the sign of each gradient, and
# that of a gradient which is zero in exact arithmetic is rounding.
ADAMW: dict[str, Any] = {"lr": 0.05, "eps": 0.05, "weight_decay": 0.1}


def standard(model: nn.Module, mesh: Any, case: Case) -> Parallel:
    """Parallelize a ``Transformer`` in the layout of a case."""
    if not isinstance(model, Transformer):
        raise TypeError(
            "verify: parallelize must be given for a model that is no fusedops.models.Transformer, "
            f"got a {type(model).__name__} and none"
        )
    given: dict[str, Any] = {**case.mesh, **case.options}
    config = ParallelConfig(**given)
    return trained_by(parallelize(model, config))


def trained_by(run: TrainEngine) -> Parallel:
    """Return a model whose steps are those of a training loop with its engine."""
    config = run.config

    def forward_backward(batch: Batch) -> torch.Tensor:
        parts = config.microbatches
        if len(batch["tokens"]) % parts:
            raise ValueError(
                f"verify: the {len(batch['tokens'])} sequences of a step are no multiple of "
                f"{parts} micro-batches"
            )
        micro = [
            {name: run.rows(tensor.chunk(parts)[i]) for name, tensor in batch.items()}
            for i in range(parts)
        ]
        shards = [run.shard_batch(**micro_batch) for micro_batch in micro]
        labels = torch.stack([shard.labels for shard in shards if shard.labels is not None])
        count = run.count(labels)
        outputs = run.step(shards, count)
        return run.mean_loss(outputs, count)

    return Parallel(run.model, forward_backward, run.optimizer(**ADAMW), run.clip)
