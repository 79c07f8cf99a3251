"""Rules for Qwen3, which also normalises each head of query and key."""

from transformers.models.qwen3 import modeling_qwen3

from fusedops.integrations.hf.families import llama_like

RULES = llama_like.rules(modeling_qwen3, "Qwen3", __name__)
