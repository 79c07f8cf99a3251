"""Images and volumes cut over processes, with halo exchange: ``docs/spatial.md``."""

from importlib import import_module

from fusedops.parallel.spatial.shard import from_parts, gather, halo_exchange, scatter, shard
from fusedops.parallel.spatial.tensor import SpatialTensor

__all__ = ["SpatialTensor", "from_parts", "gather", "halo_exchange", "scatter", "shard"]

# They register the rules of torch functions.
for _name in ("elementwise", "norm", "padding", "pool", "reduce", "shape"):
    import_module(f"{__name__}.{_name}")
