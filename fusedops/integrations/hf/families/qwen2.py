"""Rules for Qwen2."""

from __future__ import annotations

from transformers.models.qwen2 import modeling_qwen2

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = llama_like.rules(modeling_qwen2, "Qwen2", __name__)
globals().update(by_name(RULES))
