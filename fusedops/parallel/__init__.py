"""Parallelism on torch.distributed. A process group or device mesh is always an argument."""

from fusedops.parallel.expert import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.mesh import Mesh, make_mesh, rank_groups
from fusedops.parallel.sizes import Sizes

__all__ = [
    "Mesh",
    "Sizes",
    "expert_parallel",
    "make_mesh",
    "moe_combine",
    "moe_dispatch",
    "rank_groups",
]
