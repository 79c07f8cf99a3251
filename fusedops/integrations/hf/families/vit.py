"""Rules for ViT: attention, MLP, and in the block dropout + residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.vit import modeling_vit

from fusedops.integrations.hf.rules import feed_forward, residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import PatchRule, global_hooks, runs_here
from fusedops.ops.bias_dropout_add import bias_dropout_add


class ViTLayer(modeling_vit.ViTLayer):
    """ViT's block with dropout, residual sum and norm in one pass, where they meet."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the block."""
        if not runs_here(hidden_states) or _obstacle(self) is not None:
            return super().forward(hidden_states, attention_mask, **kwargs)
        dropout_p = residual_norm.probability(self.dropout)
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, attention_mask, **kwargs)
        normed, residual = residual_norm.add_norm(
            attended, hidden_states, self.layernorm_after, dropout_p
        )
        return bias_dropout_add(self.mlp(normed), None, residual, dropout_p)


_UNKNOWN_LAYER = residual_norm.unknown_forward(ViTLayer, modeling_vit.ViTLayer)


def _obstacle(layer: Any) -> str | None:
    return (
        residual_norm.norm_obstacle("layernorm_after", layer.layernorm_after)
        or residual_norm.dropout_obstacle("dropout", layer.dropout)
        or global_hooks()
        or _UNKNOWN_LAYER
    )


RULES = (
    attention_rule(modeling_vit.ViTAttention, __name__),
    feed_forward.feed_forward_rule(modeling_vit.ViTMLP, __name__),
    PatchRule(
        modeling_vit.ViTLayer,
        ViTLayer,
        ("add_layer_norm", "bias_dropout_add"),
        "O1",
        lambda layer: residual_norm.probe_add_norm(layer.layernorm_after),
        _obstacle,
        absorbs=("layernorm_after", "dropout"),
    ),
)
