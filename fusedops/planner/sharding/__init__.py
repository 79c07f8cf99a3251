"""Placements of the parameters of any model on a mesh (``docs/auto_parallel.md``)."""

from fusedops.planner.sharding.api import auto_parallel
from fusedops.planner.sharding.plan import ShardingPlan

__all__ = ["ShardingPlan", "auto_parallel"]
