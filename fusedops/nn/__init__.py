"""Drop-in modules: parameters and one call. File name = op name."""

from fusedops.nn.layer_norm import LayerNorm

__all__ = ["LayerNorm"]
