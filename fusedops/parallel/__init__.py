"""Parallelism on torch.distributed. A process group or device mesh is always an argument."""

from fusedops.parallel.context import (
    context_core,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from fusedops.parallel.expert import expert_parallel, moe_combine, moe_dispatch

__all__ = [
    "context_core",
    "expert_parallel",
    "moe_combine",
    "moe_dispatch",
    "ring_attention",
    "shard_sequence",
    "ulysses_attention",
    "unshard_sequence",
]
