"""Rules for Megatron-Core's local modules: what ``fused_spec`` builds, for a model that exists.

Its norms are torch's, which have rules of their own. The experts of a ``SequentialMLP`` are
``MLP``s.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import dot_product_attention, mlp
from megatron.core.transformer.moe import shared_experts
from torch import nn

from fusedops.integrations.hf.rules.rule import PatchRule, subclass
from fusedops.integrations.megatron import attention, feed_forward


def _feed_forward_rule(original: type[nn.Module], fused: type[nn.Module]) -> PatchRule:
    return PatchRule(
        original,
        subclass(original, fused, __name__),
        ("linear_glu", "swiglu", "geglu", "mlp", "linear_act", "bias_gelu"),
        "O2",
        obstacle=_obstacle,
        inside=feed_forward.fused_layers,
        ops_in=lambda module: (feed_forward.fused_op(module) or "linear_glu",),
    )


def _obstacle(module: Any) -> str | None:
    if feed_forward.fused_op(module) is None:
        return "no fused op has its activation behind these layers"
    return None


RULES = (
    _feed_forward_rule(mlp.MLP, feed_forward.MLP),
    _feed_forward_rule(shared_experts.SharedExpertMLP, feed_forward.SharedExpertMLP),
    PatchRule(
        dot_product_attention.DotProductAttention,
        subclass(
            dot_product_attention.DotProductAttention, attention.DotProductAttention, __name__
        ),
        ("attention",),
        "O2",
    ),
)
