"""Which part of a batch, of its sequences and of the heads a process of a layout computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from fusedops._core import philox
from fusedops.models.config import TransformerConfig
from fusedops.models.forward_context import (
    BatchPartition,
    DropoutSeeds,
    call_seeds,
    with_offsets,
)
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.parallel.comm.seeds import agreed_seed
from fusedops.parallel.context import ContextCore, context_core
from fusedops.parallel.dropout import ShardOffsets
from fusedops.parallel.mesh import Mesh
from fusedops.parallel.tensor.replicated import gather_tokens, local_chunk, scatter_tokens


@dataclass(frozen=True, eq=False)
class ProcessPartition(BatchPartition):
    """The part of the batch that a process of a mesh computes."""

    offsets: ShardOffsets  # of this process's tokens and heads in the whole batch, for dropout
    stage_group: dist.ProcessGroup | None = None  # the ranks of the stage, which share seeds
    # The ranks whose tokens count in the auxiliary loss of a router; ``None``: this one's alone
    router_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None  # ranks that share the tokens of experts
    sequence: bool = False  # whether those tokens are sharded along the sequence already
    context_core: ContextCore | None = None  # attention over the ranks of ``cp``

    @classmethod
    def of(cls, config: ParallelConfig, mesh: Mesh) -> ProcessPartition:
        """Return the part of this process in a layout."""
        has_cp, tp = config.cp > 1, mesh.rank("tp")
        offsets = ShardOffsets(
            batch_part=mesh.rank("dp"),
            sequence_part=tp if config.sp else 0,
            sequence_parts=config.tp if config.sp else 1,
            head_part=tp,
            head_parts=config.tp,
            context_part=mesh.rank("cp"),
            context_parts=config.cp,
        )
        return cls(
            offsets,
            stage_group=mesh.group("stage"),
            router_group=mesh.group("stage") if config.router_loss == "global" else None,
            tp_group=mesh.group("tp") if config.tp > 1 else None,
            sequence=config.sp,
            context_core=context_core(mesh.group("cp"), config.context) if has_cp else None,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessPartition:
        return self  # process groups cannot be copied, and nothing here changes

    def new_seed(self, device: torch.device) -> torch.Tensor:
        """Draw the seed of a forward, that of the first rank of the stage on all of its ranks."""
        return agreed_seed(device, self.stage_group)

    def attend(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attend the tokens of the whole sequence, on whatever ranks of ``cp`` they are."""
        if self.context_core is not None:
            return self.context_core(*tensors, **options)
        return super().attend(*tensors, **options)

    def shard_tokens(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens: each rank of ``tp`` computes a shard of them by all experts.

        With sequence parallelism they are sharded already.
        """
        if self.tp_group is None or self.sequence:
            return x_BSH
        return scatter_tokens(x_BSH, group=self.tp_group)

    def shard_ids(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the ids of this rank's tokens."""
        return ids_BS if self.tp_group is None else local_chunk(ids_BS, group=self.tp_group)

    def gather_tokens(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all ranks of ``tp``, of the shards that ``shard_tokens`` made."""
        if self.tp_group is None or self.sequence:
            return x_BSH
        return gather_tokens(x_BSH, group=self.tp_group)

    def dropout_seeds(
        self,
        seed: torch.Tensor,
        shape: torch.Size | tuple[int, int],
        first_sequence: int | None,
        config: TransformerConfig,
    ) -> DropoutSeeds:
        """Return the seeds of a forward, with the offsets of this rank's elements."""
        seeds, offsets = call_seeds(seed, config.num_layers), self.offsets
        if offsets == ShardOffsets() and not first_sequence:
            return DropoutSeeds(seeds, seeds)
        sequences, tokens = shape
        first = offsets.batch_part * sequences if first_sequence is None else first_sequence
        rows = offsets.rows(first, tokens // offsets.sequence_parts, config.hidden_size)
        heads = config.num_heads // offsets.head_parts
        scores = offsets.scores(first, heads, tokens * offsets.context_parts)
        return DropoutSeeds(philox.placed(seeds, rows), philox.placed(seeds, scores))


def seeds_of_later_sequences(
    seeds: DropoutSeeds, first: int, tokens: int, config: TransformerConfig
) -> DropoutSeeds:
    """Return the seeds of a forward's sequences from ``first`` on, of so many tokens here."""
    rows, scores = seeds
    if rows.shape[1] == 2:  # of a batch that one process has
        return with_offsets(rows, first, tokens, config)
    rows, scores = rows.clone(), scores.clone()
    rows[:, 5:] += first * rows[:, 3:4]
    scores[:, 2] += first * scores[:, 3]
    return DropoutSeeds(rows, scores)
