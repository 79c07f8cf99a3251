"""BERT's ends of attention and feed-forward layer, and the layers of CLIP, DistilBERT and ViT."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule, probability
from fusedops.ops.bias_dropout_add import bias_dropout_add


def _bert(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    """Return ``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``."""
    branch = self.dense(hidden_states)
    return add_norm(branch, input_tensor, self.LayerNorm, probability(self.dropout))[0]


def _clip(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.layer_norm1(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    normed, residual = add_norm(attended, hidden_states, self.layer_norm2)
    return residual + self.mlp(normed)


def _distilbert(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    attended, _ = self.attention(hidden_states, **options)
    normed, _ = add_norm(attended, hidden_states, self.sa_layer_norm)
    return add_norm(self.ffn(normed), normed, self.output_layer_norm)[0]


def _vit(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    dropout_p = probability(self.dropout)
    normed = self.layernorm_before(hidden_states)
    attended, _ = self.attention(normed, attention_mask, **options)
    normed, residual = add_norm(attended, hidden_states, self.layernorm_after, dropout_p)
    return bias_dropout_add(self.mlp(normed), None, residual, dropout_p)


_CLIP = partial(layer_rule, compute=_clip, norms=("layer_norm2",))
RULES = {
    "BertSelfOutput": partial(
        layer_rule, compute=_bert, norms=("LayerNorm",), dropouts=("dropout",)
    ),
    "CLIPEncoderLayer": _CLIP,
    "SiglipEncoderLayer": _CLIP,
    "TransformerBlock": partial(
        layer_rule, compute=_distilbert, norms=("sa_layer_norm", "output_layer_norm")
    ),
    "ViTLayer": partial(
        layer_rule,
        compute=_vit,
        norms=("layernorm_after",),
        dropouts=("dropout",),
        ops=("bias_dropout_add",),
    ),
}
