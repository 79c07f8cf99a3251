"""Rules for Phi-3: Llama with packed projections and with dropout on each branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.phi3 import modeling_phi3

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.gated_mlp import packed_gated_mlp_rule
from fusedops.integrations.hf.rules.rms_norms import add_norm, norm_obstacle, rms_norm_rule
from fusedops.integrations.hf.rules.rule import by_name, bypass_obstacle, global_hooks, runs_here


class _DecoderLayer(nn.Module):
    """The decoder layer with dropout, residual sum and the norm after it in one pass."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        options = dict(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        module: Any = self
        if not runs_here(hidden_states) or _layer_obstacle(self) is not None:
            return super().forward(hidden_states, **options)
        normed = module.input_layernorm(hidden_states)
        attended, _ = module.self_attn(hidden_states=normed, **options)
        dropout = module.resid_attn_dropout
        dropout_p = dropout.p if dropout.training else 0.0
        norm = module.post_attention_layernorm
        normed, residual = add_norm(attended, hidden_states, norm, dropout_p)
        return residual + module.resid_mlp_dropout(module.mlp(normed))


def _layer_obstacle(layer: Any) -> str | None:
    return (
        norm_obstacle("post_attention_layernorm", layer.post_attention_layernorm)
        or bypass_obstacle("resid_attn_dropout", layer.resid_attn_dropout, (nn.Dropout,))
        or global_hooks()
    )


RULES = (
    rms_norm_rule(modeling_phi3.Phi3RMSNorm, __name__),
    packed_gated_mlp_rule(modeling_phi3.Phi3MLP, __name__),
    attention_rule(modeling_phi3.Phi3Attention, __name__, eager=True, rotary=True),
    llama_like.layer_rule(
        modeling_phi3.Phi3DecoderLayer,
        _DecoderLayer,
        __name__,
        _layer_obstacle,
        ("post_attention_layernorm", "resid_attn_dropout"),
    ),
)
globals().update(by_name(RULES))
