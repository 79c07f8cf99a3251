"""A plain transformer, and the one function that spreads it over processes."""

from fusedops.models.parallel_config import ParallelConfig

__all__ = ["ParallelConfig"]
