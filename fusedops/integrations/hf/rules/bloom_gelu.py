"""Rule for the activation of BLOOM, GELU's tanh form as an autograd function of its own.

What a backward of Python code computes is not read from the code (``symbolic.py``), so that it is
known by its class.
"""

from transformers.models.bloom import modeling_bloom

from fusedops.integrations.hf.rules.transformers_modules import gelu_rule

RULES = (gelu_rule(modeling_bloom.BloomGelu, "tanh", "gelu_tanh"),)
