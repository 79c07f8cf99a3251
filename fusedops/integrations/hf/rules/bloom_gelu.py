"""Rule for the activation of BLOOM: the tanh form, whose backward is Python code of its own."""

from transformers.models.bloom import modeling_bloom

from fusedops.integrations.hf.rules.transformers_modules import gelu_rule

RULES = (gelu_rule(modeling_bloom.BloomGelu, "gelu_tanh"),)
