"""Rules for Mistral."""

from __future__ import annotations

from transformers.models.mistral import modeling_mistral

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = llama_like.rules(modeling_mistral, "Mistral", __name__)
globals().update(by_name(RULES))
