"""Rules for Llama."""

from transformers.models.llama import modeling_llama

from fusedops.integrations.hf.families import llama_like

RULES = llama_like.rules(modeling_llama, "Llama", __name__)
