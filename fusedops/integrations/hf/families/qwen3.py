"""Rules for Qwen3, which also normalises each head of query and key."""

from __future__ import annotations

from transformers.models.qwen3 import modeling_qwen3

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = llama_like.rules(modeling_qwen3, "Qwen3", __name__)
globals().update(by_name(RULES))
