"""Parallelism on torch.distributed. A process group or device mesh is always an argument."""

from fusedops.parallel.context import ring_attention
from fusedops.parallel.expert import expert_parallel, moe_combine, moe_dispatch

__all__ = ["expert_parallel", "moe_combine", "moe_dispatch", "ring_attention"]
