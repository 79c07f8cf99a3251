"""Rules for both towers of CLIP: attention, MLP, and in the block residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.clip import modeling_clip

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.feed_forward import feed_forward_rule
from fusedops.integrations.hf.rules.residual_norm import (
    add_norm,
    norm_obstacle,
    probe_add_norm,
    unknown_forward,
)
from fusedops.integrations.hf.rules.rule import PatchRule, global_hooks, runs_here


class CLIPEncoderLayer(modeling_clip.CLIPEncoderLayer):
    """CLIP's block with the first residual sum and the norm after it in one pass."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return the residual stream after the block."""
        if not runs_here(hidden_states) or _obstacle(self) is not None:
            return super().forward(hidden_states, attention_mask, **kwargs)
        attended, _ = self.self_attn(
            hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs
        )
        normed, residual = add_norm(attended, hidden_states, self.layer_norm2)
        return residual + self.mlp(normed)


_UNKNOWN_LAYER = unknown_forward(CLIPEncoderLayer, modeling_clip.CLIPEncoderLayer)


def _obstacle(layer: Any) -> str | None:
    return norm_obstacle("layer_norm2", layer.layer_norm2) or global_hooks() or _UNKNOWN_LAYER


_ATTENTION = attention_rule(modeling_clip.CLIPAttention, __name__)
_MLP = feed_forward_rule(modeling_clip.CLIPMLP, __name__)
CLIPAttention: type[nn.Module] = _ATTENTION.patched
CLIPMLP: type[nn.Module] = _MLP.patched

RULES = (
    _ATTENTION,
    _MLP,
    PatchRule(
        modeling_clip.CLIPEncoderLayer,
        CLIPEncoderLayer,
        ("add_layer_norm",),
        "O1",
        lambda layer: probe_add_norm(layer.layer_norm2),
        _obstacle,
        absorbs=("layer_norm2",),
    ),
)
