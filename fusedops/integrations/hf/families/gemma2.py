"""Rules for Gemma 2: Gemma with norms behind attention and feed-forward layer as well.

Its attention caps the scores where it is configured as ``eager``; ``sdpa`` leaves the cap out.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gemma2 import modeling_gemma2

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules import rms_norms


class _DecoderLayer(llama_like.PositionsFirst):
    absorbs = ("pre_feedforward_layernorm",)

    def _residuals(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        attended = self.post_attention_layernorm(attended)
        norm = self.pre_feedforward_layernorm
        normed, residual = rms_norms.add_norm(attended, hidden_states, norm)
        return residual + self.post_feedforward_layernorm(self.mlp(normed))


RULES = llama_like.rules(
    modeling_gemma2, "Gemma2", __name__, norm=rms_norms.GEMMA, layer=_DecoderLayer
)
