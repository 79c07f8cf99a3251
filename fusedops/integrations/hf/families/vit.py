"""Rules for ViT: attention, and in the block dropout + residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.vit import modeling_vit

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule, probability
from fusedops.ops.bias_dropout_add import bias_dropout_add


def _layer(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    dropout_p = probability(self.dropout)
    normed = self.layernorm_before(hidden_states)
    attended, _ = self.attention(normed, attention_mask, **options)
    normed, residual = add_norm(attended, hidden_states, self.layernorm_after, dropout_p)
    return bias_dropout_add(self.mlp(normed), None, residual, dropout_p)


RULES = (
    attention_rule(modeling_vit.ViTAttention, __name__),
    layer_rule(
        modeling_vit.ViTLayer,
        __name__,
        _layer,
        norms=("layernorm_after",),
        dropouts=("dropout",),
        ops=("bias_dropout_add",),
    ),
)
