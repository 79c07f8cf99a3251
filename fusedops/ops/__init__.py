"""The ops: one file each, with the public function, the specification and the registration."""

from fusedops.ops.layer_norm import layer_norm

__all__ = ["layer_norm"]
