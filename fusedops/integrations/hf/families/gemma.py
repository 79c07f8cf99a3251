"""Rules for Gemma, whose norms keep their weight minus one."""

from transformers.models.gemma import modeling_gemma

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules import rms_norms

RULES = llama_like.rules(modeling_gemma, "Gemma", __name__, norm=rms_norms.GEMMA)
