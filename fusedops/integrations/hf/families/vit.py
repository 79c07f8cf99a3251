"""Rules for ViT: attention, MLP, and in the block dropout + residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.vit import modeling_vit

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.ops.bias_dropout_add import bias_dropout_add


class _Layer(nn.Module):
    """ViT's block with dropout, residual sum and norm in one pass, where they meet."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the block."""
        dropout_p = residual_norm.probability(self.dropout)
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, attention_mask, **kwargs)
        normed, residual = residual_norm.add_norm(
            attended, hidden_states, self.layernorm_after, dropout_p
        )
        return bias_dropout_add(self.mlp(normed), None, residual, dropout_p)


RULES = (
    attention_rule(modeling_vit.ViTAttention, __name__),
    residual_norm.layer_rule(
        modeling_vit.ViTLayer,
        __name__,
        _Layer,
        ("add_layer_norm", "bias_dropout_add"),
        norms=("layernorm_after",),
        dropouts=("dropout",),
    ),
)
