"""Modules of the fused ops, with the parameters and the ``state_dict`` of those of torch.

The file of a module has the name of its op.
"""

from fusedops.nn.add_layer_norm import AddLayerNorm
from fusedops.nn.add_rms_norm import AddRMSNorm
from fusedops.nn.balancing_bias import BalancingBias
from fusedops.nn.cross_entropy import CrossEntropyLoss
from fusedops.nn.dropout import Dropout
from fusedops.nn.gated_mlp import GatedMLP
from fusedops.nn.layer_norm import LayerNorm
from fusedops.nn.linear_act import LinearAct
from fusedops.nn.linear_cross_entropy import LinearCrossEntropyLoss
from fusedops.nn.mlp import MLP
from fusedops.nn.moe import MoE
from fusedops.nn.multihead_attention import MultiheadAttention
from fusedops.nn.quantized_linear import QuantizedLinear
from fusedops.nn.rms_norm import RMSNorm
from fusedops.nn.transformer_layer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BalancingBias",
    "CrossEntropyLoss",
    "Dropout",
    "GatedMLP",
    "LayerNorm",
    "LinearAct",
    "LinearCrossEntropyLoss",
    "MLP",
    "MoE",
    "MultiheadAttention",
    "QuantizedLinear",
    "RMSNorm",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
