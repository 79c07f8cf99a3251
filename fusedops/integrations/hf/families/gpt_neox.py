"""Rules for GPT-NeoX: Pythia and its kin, whose two branches are parallel or follow each other.

The layer's rule is for branches that follow each other: parallel ones have no norm after a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_neox import modeling_gpt_neox

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule, probability


def _layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    attended, _ = self.attention(self.input_layernorm(hidden_states), **options)
    dropout_p = probability(self.post_attention_dropout)
    norm = self.post_attention_layernorm
    normed, residual = add_norm(attended, hidden_states, norm, dropout_p)
    output: torch.Tensor = self.post_mlp_dropout(self.mlp(normed)) + residual
    return output


RULES = (
    attention_rule(modeling_gpt_neox.GPTNeoXAttention, __name__, eager=True, rotary=True),
    layer_rule(
        modeling_gpt_neox.GPTNeoXLayer,
        __name__,
        _layer,
        norms=("post_attention_layernorm",),
        dropouts=("post_attention_dropout",),
        applies=lambda layer: not layer.use_parallel_residual,
    ),
)
