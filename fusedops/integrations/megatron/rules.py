"""Rules for Megatron-Core's local modules: what ``fused_spec`` builds, for a model that exists.

Its norms are torch's, which have rules of their own. The experts of a ``SequentialMLP`` are
``MLP``s.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import dot_product_attention, mlp
from megatron.core.transformer.moe import shared_experts
from torch import nn

from fusedops.integrations.hf.rules.rule import FusionPlan, PatchRule, Refusal, always, subclass
from fusedops.integrations.megatron import attention, feed_forward


def _feed_forward_rule(original: type[nn.Module], fused: type[nn.Module]) -> PatchRule:
    return PatchRule(
        original,
        subclass(original, fused, __name__),
        "O2",
        _feed_forward_plan,
    )


def _feed_forward_plan(module: Any) -> FusionPlan | Refusal:
    op = feed_forward.fused_op(module)
    if op is None:
        return Refusal("no fused op has its activation behind these layers")
    return FusionPlan((op,), feed_forward.fused_layers(module))


RULES = (
    _feed_forward_rule(mlp.MLP, feed_forward.MLP),
    _feed_forward_rule(shared_experts.SharedExpertMLP, feed_forward.SharedExpertMLP),
    PatchRule(
        dot_product_attention.DotProductAttention,
        subclass(
            dot_product_attention.DotProductAttention, attention.DotProductAttention, __name__
        ),
        "O2",
        always("attention"),
    ),
)
