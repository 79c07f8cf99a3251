"""Rules for Qwen2."""

from __future__ import annotations

from transformers.models.qwen2 import modeling_qwen2

from fusedops.integrations.hf.attention import attention_rule
from fusedops.integrations.hf.llama_like import by_name, gated_mlp_rule, rms_norm_rule

RULES = (
    attention_rule(modeling_qwen2.Qwen2Attention, __name__),
    rms_norm_rule(modeling_qwen2.Qwen2RMSNorm, __name__),
    gated_mlp_rule(modeling_qwen2.Qwen2MLP, __name__),
)
globals().update(by_name(RULES))
