"""Rules for Gemma 2: Gemma with norms behind attention and feed-forward layer as well.

Its attention caps the scores where it is configured as ``eager``; ``sdpa`` leaves the cap out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gemma2 import modeling_gemma2

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules import rms_norms
from fusedops.integrations.hf.rules.rms_norms import add_norm, norm_obstacle
from fusedops.integrations.hf.rules.rule import by_name, global_hooks, runs_here


class _DecoderLayer(nn.Module):
    """The decoder layer with the first residual sum and the norm after it in one pass."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        options = dict(
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        module: Any = self
        if not runs_here(hidden_states) or _layer_obstacle(self) is not None:
            return super().forward(hidden_states, **options)
        normed = module.input_layernorm(hidden_states)
        attended, _ = module.self_attn(hidden_states=normed, **options)
        attended = module.post_attention_layernorm(attended)
        normed, residual = add_norm(attended, hidden_states, module.pre_feedforward_layernorm)
        return residual + module.post_feedforward_layernorm(module.mlp(normed))


def _layer_obstacle(layer: Any) -> str | None:
    name = "pre_feedforward_layernorm"
    return norm_obstacle(name, layer.pre_feedforward_layernorm) or global_hooks()


RULES = (
    *llama_like.rules_inside(modeling_gemma2, "Gemma2", __name__, norm=rms_norms.GEMMA),
    llama_like.layer_rule(
        modeling_gemma2.Gemma2DecoderLayer,
        _DecoderLayer,
        __name__,
        _layer_obstacle,
        ("pre_feedforward_layernorm",),
    ),
)
globals().update(by_name(RULES))
