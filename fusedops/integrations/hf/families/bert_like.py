"""Rules for what BERT's descendants copy: attention, and the ends of attention and MLP.

The copies differ in name only (``RobertaSelfOutput`` is ``BertSelfOutput``).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf import patched
from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import PatchRule

# Family -> what its classes' names begin with.
FAMILIES = {
    "bert": "Bert",
    "camembert": "Camembert",
    "electra": "Electra",
    "roberta": "Roberta",
    "xlm_roberta": "XLMRoberta",
}


class _Output(nn.Module):
    """``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``, all after the product in one."""

    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        dropout_p = residual_norm.probability(self.dropout)
        branch = self.dense(hidden_states)
        return residual_norm.add_norm(branch, input_tensor, self.LayerNorm, dropout_p)[0]


def rules(name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's copies of BERT's modules."""
    family: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    prefix = FAMILIES[name]
    attentions = [getattr(family, f"{prefix}{kind}Attention") for kind in ("Self", "Cross")]
    module_name = patched.module_of(attentions[0])
    outputs = [getattr(family, f"{prefix}{kind}") for kind in ("SelfOutput", "Output")]
    return (
        *(attention_rule(original, module_name, ("dropout",)) for original in attentions),
        *(
            residual_norm.layer_rule(
                original,
                module_name,
                _Output,
                ("add_layer_norm",),
                norms=("LayerNorm",),
                dropouts=("dropout",),
            )
            for original in outputs
        ),
    )
