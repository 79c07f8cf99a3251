"""Rules for Llama."""

from __future__ import annotations

from transformers.models.llama import modeling_llama

from fusedops.integrations.hf.attention import attention_rule
from fusedops.integrations.hf.llama_like import by_name, gated_mlp_rule, rms_norm_rule

RULES = (
    attention_rule(modeling_llama.LlamaAttention, __name__),
    rms_norm_rule(modeling_llama.LlamaRMSNorm, __name__),
    gated_mlp_rule(modeling_llama.LlamaMLP, __name__),
)
globals().update(by_name(RULES))
