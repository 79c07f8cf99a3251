"""Context parallelism: operators over sequences that are sharded over a group of ranks."""

from fusedops.parallel.context.all_to_all import ulysses_attention
from fusedops.parallel.context.core import ContextCore, context_core
from fusedops.parallel.context.recurrence import (
    context_causal_conv1d,
    context_gated_delta_rule,
    context_selective_state_space,
)
from fusedops.parallel.context.ring import ring_attention
from fusedops.parallel.context.shards import shard_sequence, unshard_sequence

__all__ = [
    "ContextCore",
    "context_causal_conv1d",
    "context_core",
    "context_gated_delta_rule",
    "context_selective_state_space",
    "ring_attention",
    "shard_sequence",
    "ulysses_attention",
    "unshard_sequence",
]
