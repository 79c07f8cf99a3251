"""Context parallelism: attention over sequences that are sharded over a group of ranks."""

from fusedops.parallel.context.all_to_all import ulysses_attention
from fusedops.parallel.context.core import ContextCore, context_core
from fusedops.parallel.context.ring import ring_attention
from fusedops.parallel.context.shards import shard_sequence, unshard_sequence

__all__ = [
    "ContextCore",
    "context_core",
    "ring_attention",
    "shard_sequence",
    "ulysses_attention",
    "unshard_sequence",
]
