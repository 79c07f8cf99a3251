"""A step of a transformer whose layers are divided: what its stages compute, and what they share.

Every rank of the pipeline has the whole micro-batch: tokens, labels and positions do not travel,
hidden states do. The table of words that embedding and head share is whole on both; its gradients
are added once, at the end of the step, the first stage's first, so that both copies stay equal to
the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fusedops._core import dtypes
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parallelization.stages import Stage
from fusedops.models.transformer import Loss, Transformer
from fusedops.optim import global_norm
from fusedops.parallel.comm import collectives
from fusedops.parallel.data.grad_sync import GradientSync
from fusedops.parallel.mesh import Mesh
from fusedops.parallel.pipeline.driver import Driver
from fusedops.parallel.pipeline.schedules import table
from fusedops.parallel.tensor.layers import local

if TYPE_CHECKING:
    from fusedops.models.parallelization.engine import Parallelized, Shard

# What embedding and head share.
WORDS = "embedding.tokens.weight"

Computing = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The stages of a process and what runs them.

    Attributes:
        model: this process's part.
        stages: by number.
        driver: what runs them.
        other_end: with shared words on the first and the last rank: the rank of the pipeline that
            has them too; ``None`` elsewhere.
    """

    model: Transformer
    stages: Mapping[int, Stage]
    driver: Driver
    other_end: int | None

    @classmethod
    def of(
        cls,
        model: Transformer,
        config: ParallelConfig,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        data: Mapping[int, GradientSync],
    ) -> Pipeline:
        """Return the pipeline of a model that was cut."""
        for each in data.values():
            for replicas in each.reducers:
                replicas.remove()  # half of a backward passes their hooks by; the driver tells them
        order = table(config.pipeline_schedule, config.pp, config.microbatches, config.virtual)
        ends = [order.rank_of(0), order.rank_of(order.stages - 1)]
        other, rank = None, mesh.rank("pp")
        if model.config.tied and ends[0] != ends[1] and rank in ends:
            other = ends[1 - ends.index(rank)]
        return cls(model, stages, Driver(order, mesh.group("pp"), stages, data), other)

    def step(
        self,
        run: Parallelized,
        shards: Sequence[Shard],
        num_tokens: torch.Tensor,
        scale: float,
        computing: Computing,
        draws: Sequence[Mapping[str, Any]],
    ) -> list[Loss]:
        """Run the schedule; as ``Parallelized.step``."""
        found = [self._nothing(each) for each in shards]

        def compute(
            stage: int, microbatch: int, given: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, torch.Tensor]:
            with computing():
                x_BSH, loss = self._run(stage, shards[microbatch], given, draws[microbatch])
            share = run.loss(loss, num_tokens) * scale
            found[microbatch] = _added(found[microbatch], loss)
            return x_BSH, share

        self.driver.step(compute, shards[0].tokens.device, _keys(_tokens(shards), computing))
        self._share_words()
        return found

    def forward(self, shards: Sequence[Shard], computing: Computing) -> list[Loss]:
        """Run the forwards alone; as ``Parallelized.forward``."""
        found = [self._nothing(each) for each in shards]

        def compute(
            stage: int, microbatch: int, given: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, None]:
            with computing():
                x_BSH, loss = self._run(stage, shards[microbatch], given, {})
            found[microbatch] = _added(found[microbatch], loss)
            return x_BSH, None

        self.driver.forward(compute, shards[0].tokens.device, _keys(_tokens(shards), computing))
        return found

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Return what may follow tokens that pass the stages one after the other.

        Args:
            tokens: ``[B, S]``, the same on all ranks of the pipeline.
            positions: ``[S]`` or ``[B, S]``.

        Returns:
            What ``Head.project`` gives, on the rank of the last stage; ``None`` on the others.
        """
        found: list[torch.Tensor] = []

        def compute(
            stage: int, microbatch: int, given: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, None]:
            given = tokens if given is None else given
            x_BSH, _ = self.stages[stage](given, positions=positions, tokens=tokens)
            if not self.stages[stage].is_last:
                return x_BSH, None
            assert x_BSH is not None
            found.append(x_BSH)
            return None, None

        self._whole_batch.forward(compute, tokens.device, _keys([tokens], nullcontext))
        return found[0] if found else None

    @cached_property
    def _whole_batch(self) -> Driver:
        """What runs forwards of a batch that is not divided."""
        return Driver(replace(self.driver.table, microbatches=1), self.driver.group, self.stages)

    def _run(
        self,
        stage: int,
        shard: Shard,
        given: torch.Tensor | None,
        draws: Mapping[str, Any],
    ) -> tuple[torch.Tensor | None, Loss]:
        tokens, labels, positions, document_ids, domains = shard
        return self.stages[stage](
            tokens if given is None else given,
            labels,
            positions=positions,
            document_ids=document_ids,
            tokens=tokens,
            domains=domains,
            **draws,
        )

    def _nothing(self, shard: Shard) -> Loss:
        """Return the parts of a loss to which stages add theirs, in the dtype that all have."""
        dtype = dtypes.statistics_dtype(next(self.model.parameters()).dtype)
        zero = torch.zeros((), dtype=dtype, device=shard.tokens.device)
        return Loss(zero, torch.zeros_like(zero, dtype=torch.int64), zero)

    def _share_words(self) -> None:
        """Add the gradients of the table of words that stands on two ranks."""
        if self.other_end is None:
            return
        weight = self.model.embedding.tokens.weight
        assert weight.grad is not None
        mine = local(weight.grad)
        group = self.driver.group
        theirs = collectives.send_receive(
            mine, group, to=self.other_end, source=self.other_end, label="words"
        ).wait()
        parts = [mine, theirs] if group.rank() < self.other_end else [theirs, mine]
        mine.copy_(collectives.ordered_sum(parts))

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradients of all stages; words that are shared count once."""
        # The rank before the other end is the first one.
        again = self.other_end is not None and self.other_end < self.driver.group.rank()
        grads = [
            each.grad
            for name, each in self.model.named_parameters()
            if each.grad is not None and not (again and name == WORDS)
        ]
        mine = global_norm(grads).square()[None]
        every = collectives.all_gather(mine, self.driver.group, label="norm").wait()
        values = every.tolist()
        finite = all(map(math.isfinite, values))
        return torch.tensor(
            math.sqrt(math.fsum(values)) if finite else sum(values),
            dtype=torch.float64,
            device=mine.device,
        )


def _added(one: Loss, other: Loss) -> Loss:
    """Return the sum of two losses, without a graph."""
    return Loss(*(a + b.detach() for a, b in zip(one, other, strict=True)))


def _tokens(shards: Sequence[Shard]) -> list[torch.Tensor]:
    return [each.tokens for each in shards]


def _keys(tokens: Sequence[torch.Tensor], computing: Computing) -> Callable[[int], Hashable]:
    """Return what tells micro-batches apart whose hidden states have another shape or dtype."""
    device = tokens[0].device.type
    with computing():
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    training = torch.is_grad_enabled()
    return lambda microbatch: (tuple(tokens[microbatch].shape), dtype, training)
