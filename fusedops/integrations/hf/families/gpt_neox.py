"""Rules for GPT-NeoX: Pythia and its kin, whose two branches are parallel or follow each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gpt_neox import modeling_gpt_neox

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule


class _Layer(nn.Module):
    """The layer with dropout, residual sum and the norm after it in one pass.

    Only for branches that follow each other: parallel ones have no norm after a sum.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = False,
        layer_past: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        attended, _ = self.attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            layer_past=layer_past,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        dropout_p = residual_norm.probability(self.post_attention_dropout)
        norm = self.post_attention_layernorm
        normed, residual = residual_norm.add_norm(attended, hidden_states, norm, dropout_p)
        return self.post_mlp_dropout(self.mlp(normed)) + residual


_ORIGINAL = modeling_gpt_neox.GPTNeoXLayer
_UNKNOWN = residual_norm.unknown(_Layer, _ORIGINAL, ("use_parallel_residual",))


def _obstacle(layer: Any) -> str | None:
    return "its branches are parallel" if layer.use_parallel_residual else _UNKNOWN


RULES = (
    attention_rule(modeling_gpt_neox.GPTNeoXAttention, __name__, eager=True, rotary=True),
    residual_norm.layer_rule(
        _ORIGINAL,
        __name__,
        _Layer,
        ("add_layer_norm",),
        norms=("post_attention_layernorm",),
        dropouts=("post_attention_dropout",),
        obstacle=_obstacle,
        applies=lambda layer: not layer.use_parallel_residual,
    ),
)
