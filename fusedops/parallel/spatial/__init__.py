"""Images and volumes cut over processes, with halo exchange: ``docs/spatial.md``."""

from fusedops.parallel.spatial import (  # noqa: F401  their rules
    conv as _conv,
)
from fusedops.parallel.spatial import (
    elementwise,
    padding,
    shape,
)
from fusedops.parallel.spatial.shard import conv, gather, halo_exchange, scatter, shard
from fusedops.parallel.spatial.tensor import SpatialTensor

__all__ = ["SpatialTensor", "conv", "gather", "halo_exchange", "scatter", "shard"]
