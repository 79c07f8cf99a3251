"""Rules for Qwen2."""

from transformers.models.qwen2 import modeling_qwen2

from fusedops.integrations.hf.families import llama_like

RULES = llama_like.rules(modeling_qwen2, "Qwen2", __name__)
