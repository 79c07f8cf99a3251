"""Rules for what BERT's descendants copy: attention, and the ends of attention and MLP.

The copies differ in name only (``RobertaSelfOutput`` is ``BertSelfOutput``).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fusedops.integrations.hf import patched
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule, probability
from fusedops.integrations.hf.rules.rule import PatchRule

# Family -> what its classes' names begin with.
FAMILIES = {
    "bert": "Bert",
    "camembert": "Camembert",
    "electra": "Electra",
    "roberta": "Roberta",
    "xlm_roberta": "XLMRoberta",
}


def _output(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    """Return ``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``."""
    branch = self.dense(hidden_states)
    return add_norm(branch, input_tensor, self.LayerNorm, probability(self.dropout))[0]


def rules(name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's copies of BERT's modules."""
    family: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    prefix = FAMILIES[name]
    attentions = [getattr(family, f"{prefix}{kind}Attention") for kind in ("Self", "Cross")]
    module_name = patched.module_of(attentions[0])
    outputs = [getattr(family, f"{prefix}{kind}") for kind in ("SelfOutput", "Output")]
    absorbed: Any = {"norms": ("LayerNorm",), "dropouts": ("dropout",)}
    return (
        *(attention_rule(original, module_name, ("dropout",)) for original in attentions),
        *(layer_rule(original, module_name, _output, **absorbed) for original in outputs),
    )
