"""Context parallelism: attention over sequences that are sharded over a group of ranks."""

from fusedops.parallel.context.ring import ring_attention

__all__ = ["ring_attention"]
