"""Whisper's layers, which hold their MLP and dropouts themselves.

In a layer, dropout + residual sum + norm are one op, the MLP is another (two where its inner
dropout has work), dropout + residual sum at the end a third.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.activations import DropoutFunction
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule
from fusedops.ops.bias_dropout_add import bias_dropout_add

_INNER_DROPOUT = DropoutFunction(("attribute", "activation_dropout"))
_STEPS = ("fc1", "activation_fn", _INNER_DROPOUT, "fc2")


def _encoder_layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.self_attn_layer_norm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    hidden_states = _after_attention(self, attended, hidden_states)
    if hidden_states.dtype == torch.float16:
        bound = torch.finfo(torch.float16).max - 1000
        hidden_states = hidden_states.clamp(-bound, bound)
    return hidden_states


def _decoder_layer(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    encoder_hidden_states: torch.Tensor | None,
    encoder_attention_mask: torch.Tensor | None,
    use_cache: bool | None,
    **options: Any,
) -> torch.Tensor:
    normed = self.self_attn_layer_norm(hidden_states)
    attended, _ = self.self_attn(normed, attention_mask=attention_mask, **options)
    if encoder_hidden_states is not None:
        norm = self.encoder_attn_layer_norm
        normed, hidden_states = add_norm(attended, hidden_states, norm, _dropout_p(self))
        attended, _ = self.encoder_attn(
            normed,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            **options,
        )
    return _after_attention(self, attended, hidden_states)


def _after_attention(
    layer: Any, attended: torch.Tensor, hidden_states: torch.Tensor
) -> torch.Tensor:
    """Return the residual stream after the layer's last attention and its MLP."""
    dropout_p = _dropout_p(layer)
    normed, residual = add_norm(attended, hidden_states, layer.final_layer_norm, dropout_p)
    return bias_dropout_add(chain.run(layer, _STEPS, normed), None, residual, dropout_p)


def _dropout_p(layer: Any) -> float:
    return layer.dropout if layer.training else 0.0


_RULE = partial(layer_rule, ops=("bias_dropout_add",), feed_forward=_STEPS)
RULES = {
    "WhisperEncoderLayer": partial(_RULE, compute=_encoder_layer, norms=("final_layer_norm",)),
    "WhisperDecoderLayer": partial(
        _RULE, compute=_decoder_layer, norms=("encoder_attn_layer_norm", "final_layer_norm")
    ),
}
