"""Rules for Megatron-Core's local modules: what ``fused_spec`` builds, for a model that exists.

Its norms are torch's, which have rules of their own. The experts of a ``SequentialMLP`` are
``MLP``s.
"""

from __future__ import annotations

from megatron.core.transformer import dot_product_attention, mlp
from megatron.core.transformer.moe import shared_experts

from fusedops.integrations.hf.rules.rule import PatchRule, always, subclass
from fusedops.integrations.megatron import attention, feed_forward

_THEIRS = dot_product_attention.DotProductAttention
RULES = (
    PatchRule(mlp.MLP, subclass(mlp.MLP, feed_forward.MLP), "O2", feed_forward.plan),
    PatchRule(
        shared_experts.SharedExpertMLP,
        subclass(shared_experts.SharedExpertMLP, feed_forward.SharedExpertMLP),
        "O2",
        feed_forward.plan,
    ),
    PatchRule(_THEIRS, subclass(_THEIRS, attention.DotProductAttention), "O2", always("attention")),
)
