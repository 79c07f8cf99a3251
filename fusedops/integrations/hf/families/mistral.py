"""Rules for Mistral."""

from transformers.models.mistral import modeling_mistral

from fusedops.integrations.hf.families import llama_like

RULES = llama_like.rules(modeling_mistral, "Mistral", __name__)
