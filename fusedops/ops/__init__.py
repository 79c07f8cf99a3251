"""The ops: one file each, with the public function, the specification and the registration."""

from fusedops.ops.bias_gelu import bias_gelu
from fusedops.ops.gelu import gelu
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.linear_act import linear_act
from fusedops.ops.mlp import mlp

__all__ = ["bias_gelu", "gelu", "layer_norm", "linear_act", "mlp"]
