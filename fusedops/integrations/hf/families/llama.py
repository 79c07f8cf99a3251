"""Rules for Llama."""

from __future__ import annotations

from transformers.models.llama import modeling_llama

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = llama_like.rules(modeling_llama, "Llama", __name__)
globals().update(by_name(RULES))
