"""Fused transformer ops as functions; all of them are also names of ``fusedops``.

Each has one file, with the public function, the specification and the registration. Its kernels
are ``kernels/NAME.py`` and ``csrc/*/*/NAME.*``. In C++ ops share files: the norms ``norm.*``,
swiglu and geglu ``glu.*``, all attention ops ``attention*``, the ops that move rows of experts
``moe_rows.*`` and ``moe_pack.*``, square_sums ``adamw.*``; ``gemm/`` makes all matrix products.

The import registers all of ``torch.ops.fusedops``.
"""

from fusedops._core import backends as _backends
from fusedops._core.imports import without_garbage_collection
from fusedops._core.library import tag_compiled_code as _tag_compiled_code

with without_garbage_collection():
    from fusedops.ops import (
        _flops,
        adamw,  # noqa: F401 for fusedops.optim
        square_sums,  # noqa: F401 for fusedops.optim
    )
    from fusedops.ops._balancing import update_balancing_bias
    from fusedops.ops._routing_plan import RoutingPlan
    from fusedops.ops._routing_reuse import keep_routing, routing_contexts
    from fusedops.ops.add_layer_norm import add_layer_norm
    from fusedops.ops.add_rms_norm import add_rms_norm
    from fusedops.ops.attention import attention, merge_attention
    from fusedops.ops.attention_decode import attention_decode
    from fusedops.ops.attention_varlen import attention_varlen
    from fusedops.ops.baddbmm import baddbmm
    from fusedops.ops.bias_dropout_add import bias_dropout_add
    from fusedops.ops.bias_gelu import bias_gelu
    from fusedops.ops.causal_conv1d import causal_conv1d
    from fusedops.ops.cross_entropy import cross_entropy
    from fusedops.ops.gated_delta_rule import gated_delta_rule
    from fusedops.ops.gated_rms_norm import gated_rms_norm
    from fusedops.ops.geglu import geglu
    from fusedops.ops.gelu import gelu
    from fusedops.ops.grouped_mm import grouped_mm
    from fusedops.ops.hash_route import hash_route
    from fusedops.ops.layer_norm import layer_norm
    from fusedops.ops.linear_act import linear_act
    from fusedops.ops.linear_cross_entropy import linear_cross_entropy
    from fusedops.ops.linear_glu import linear_glu
    from fusedops.ops.linear_token_logprobs import linear_token_logprobs
    from fusedops.ops.mlp import mlp
    from fusedops.ops.moe_mlp import moe_mlp
    from fusedops.ops.moe_pack import moe_pack
    from fusedops.ops.moe_permute import moe_permute
    from fusedops.ops.moe_relayout import moe_relayout
    from fusedops.ops.moe_route import moe_capacity, moe_route
    from fusedops.ops.moe_router_loss import moe_router_loss
    from fusedops.ops.moe_sort import moe_sort
    from fusedops.ops.moe_unpack import moe_unpack
    from fusedops.ops.moe_unpermute import moe_unpermute
    from fusedops.ops.quantized_linear import quantized_linear
    from fusedops.ops.rms_norm import rms_norm
    from fusedops.ops.rotary_embedding import rotary_embedding
    from fusedops.ops.scaled_masked_softmax import scaled_masked_softmax
    from fusedops.ops.selective_scan import selective_scan
    from fusedops.ops.selective_state_space import selective_state_space
    from fusedops.ops.swiglu import swiglu
    from fusedops.ops.token_logprobs import TokenLogprobs, token_logprobs

_flops.register()
_backends.start()
_tag_compiled_code()

__all__ = [
    "RoutingPlan",
    "TokenLogprobs",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_decode",
    "attention_varlen",
    "baddbmm",
    "bias_dropout_add",
    "bias_gelu",
    "causal_conv1d",
    "cross_entropy",
    "gated_delta_rule",
    "gated_rms_norm",
    "geglu",
    "gelu",
    "grouped_mm",
    "layer_norm",
    "hash_route",
    "keep_routing",
    "linear_act",
    "linear_cross_entropy",
    "linear_glu",
    "linear_token_logprobs",
    "merge_attention",
    "mlp",
    "moe_capacity",
    "moe_mlp",
    "moe_pack",
    "moe_permute",
    "moe_relayout",
    "moe_route",
    "moe_router_loss",
    "moe_sort",
    "moe_unpack",
    "moe_unpermute",
    "quantized_linear",
    "rms_norm",
    "rotary_embedding",
    "routing_contexts",
    "scaled_masked_softmax",
    "selective_scan",
    "selective_state_space",
    "swiglu",
    "token_logprobs",
    "update_balancing_bias",
]
