"""Rules for both towers of CLIP: attention, and in the block residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.clip import modeling_clip

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule


def _layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.layer_norm1(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    normed, residual = add_norm(attended, hidden_states, self.layer_norm2)
    return residual + self.mlp(normed)


RULES = (
    attention_rule(modeling_clip.CLIPAttention, __name__),
    layer_rule(modeling_clip.CLIPEncoderLayer, __name__, _layer, norms=("layer_norm2",)),
)
