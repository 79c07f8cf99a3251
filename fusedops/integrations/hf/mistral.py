"""Rules for Mistral."""

from __future__ import annotations

from transformers.models.mistral import modeling_mistral

from fusedops.integrations.hf.attention import attention_rule
from fusedops.integrations.hf.llama_like import by_name, gated_mlp_rule, rms_norm_rule

RULES = (
    attention_rule(modeling_mistral.MistralAttention, __name__),
    rms_norm_rule(modeling_mistral.MistralRMSNorm, __name__),
    gated_mlp_rule(modeling_mistral.MistralMLP, __name__),
)
globals().update(by_name(RULES))
