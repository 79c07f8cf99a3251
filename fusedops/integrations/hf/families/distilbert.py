"""Rules for DistilBERT: attention, and in the block residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.distilbert import modeling_distilbert

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule


def _block(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    attended, _ = self.attention(hidden_states, **options)
    normed, _ = add_norm(attended, hidden_states, self.sa_layer_norm)
    return add_norm(self.ffn(normed), normed, self.output_layer_norm)[0]


RULES = (
    attention_rule(modeling_distilbert.DistilBertSelfAttention, __name__, ("dropout",)),
    layer_rule(
        modeling_distilbert.TransformerBlock,
        __name__,
        _block,
        norms=("sa_layer_norm", "output_layer_norm"),
    ),
)
