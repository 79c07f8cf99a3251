"""Fused modules for Megatron-Core's specs (0.16), in place of its local ones.

from fusedops.integrations.megatron import layer_spec
model = GPTModel(config, transformer_layer_spec=layer_spec(), ...)
"""

from fusedops._core import imports as _imports

_imports.needed("megatron.core", "megatron-core", "fusedops.integrations.megatron")

from fusedops.integrations.megatron.attention import DotProductAttention  # noqa: E402
from fusedops.integrations.megatron.experts import GroupedMLP  # noqa: E402
from fusedops.integrations.megatron.feed_forward import (  # noqa: E402
    MLP,
    SequentialMLP,
    SharedExpertMLP,
    TransformerLayer,
)
from fusedops.integrations.megatron.norms import Norm  # noqa: E402
from fusedops.integrations.megatron.spec import fused_spec, layer_spec  # noqa: E402

__all__ = [
    "MLP",
    "DotProductAttention",
    "GroupedMLP",
    "Norm",
    "SequentialMLP",
    "SharedExpertMLP",
    "TransformerLayer",
    "fused_spec",
    "layer_spec",
]
