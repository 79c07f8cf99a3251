"""Rules for Phi-3: Llama with packed projections and with dropout on each branch."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.phi3 import modeling_phi3

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules import residual_norm, rms_norms
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.gated_mlp import packed_gated_mlp_rule


class _DecoderLayer(llama_like.DecoderLayer):
    absorbs = ("post_attention_layernorm", "resid_attn_dropout")

    def _residuals(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        dropout_p = residual_norm.probability(self.resid_attn_dropout)
        norm = self.post_attention_layernorm
        normed, residual = rms_norms.add_norm(attended, hidden_states, norm, dropout_p)
        return residual + self.resid_mlp_dropout(self.mlp(normed))


RULES = (
    rms_norms.rms_norm_rule(modeling_phi3.Phi3RMSNorm, __name__),
    packed_gated_mlp_rule(modeling_phi3.Phi3MLP, __name__),
    attention_rule(modeling_phi3.Phi3Attention, __name__, eager=True, rotary=True),
    llama_like.layer_rule(modeling_phi3.Phi3DecoderLayer, __name__, _DecoderLayer),
)
