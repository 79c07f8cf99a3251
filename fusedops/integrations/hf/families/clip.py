"""Rules for both towers of CLIP: attention, MLP, and in the block residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.clip import modeling_clip

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule


class _EncoderLayer(nn.Module):
    """CLIP's block with the first residual sum and the norm after it in one pass."""

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return the residual stream after the block."""
        attended, _ = self.self_attn(
            hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs
        )
        normed, residual = residual_norm.add_norm(attended, hidden_states, self.layer_norm2)
        return residual + self.mlp(normed)


RULES = (
    attention_rule(modeling_clip.CLIPAttention, __name__),
    residual_norm.layer_rule(
        modeling_clip.CLIPEncoderLayer,
        __name__,
        _EncoderLayer,
        ("add_layer_norm",),
        norms=("layer_norm2",),
    ),
)
