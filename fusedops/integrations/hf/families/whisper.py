"""Rules for Whisper: attention, and the layers, which hold their MLP and dropouts themselves.

In a layer, dropout + residual sum + norm are one op, the MLP is another (two where its inner
dropout has work), dropout + residual sum at the end a third.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.whisper import modeling_whisper

from fusedops.integrations.hf.rules import feed_forward, residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.bias_dropout_add import bias_dropout_add

_NAMES = feed_forward.Names()


class _EncoderLayer(nn.Module):
    """The encoder's layer on the fused ops."""

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        attended, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(hidden_states),
            attention_mask=attention_mask,
            **kwargs,
        )
        hidden_states = _after_attention(self, attended, hidden_states)
        if hidden_states.dtype == torch.float16:
            bound = torch.finfo(torch.float16).max - 1000
            hidden_states = hidden_states.clamp(-bound, bound)
        return hidden_states


class _DecoderLayer(nn.Module):
    """The decoder's layer on the fused ops."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        attended, _ = self.self_attn(
            self.self_attn_layer_norm(hidden_states),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            **kwargs,
        )
        if encoder_hidden_states is None:
            return _after_attention(self, attended, hidden_states)
        normed, hidden_states = residual_norm.add_norm(
            attended, hidden_states, self.encoder_attn_layer_norm, _dropout_p(self)
        )
        attended, _ = self.encoder_attn(
            normed,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        return _after_attention(self, attended, hidden_states)


def _after_attention(
    layer: Any, attended: torch.Tensor, hidden_states: torch.Tensor
) -> torch.Tensor:
    """Return the residual stream after the layer's last attention and its MLP."""
    dropout_p = _dropout_p(layer)
    normed, residual = residual_norm.add_norm(
        attended, hidden_states, layer.final_layer_norm, dropout_p
    )
    inner_p = layer.activation_dropout if layer.training else 0.0
    if not runs_here(normed):
        inner = layer.activation_fn(layer.fc1(normed))
        output = layer.fc2(nn.functional.dropout(inner, inner_p))
    elif inner_p > 0.0:
        inner = feed_forward.dense_act(layer.fc1, layer.activation_fn, normed)
        output = layer.fc2(nn.functional.dropout(inner, inner_p))
    else:
        output = feed_forward.fused(layer, _NAMES, normed)
    return bias_dropout_add(output, None, residual, dropout_p)


def _dropout_p(layer: Any) -> float:
    return layer.dropout if layer.training else 0.0


def _called(layer: Any) -> tuple[str, ...]:
    return ("fc2",) if layer.training and layer.activation_dropout > 0.0 else ()


_FEED_FORWARD: dict[str, Any] = {
    "ops": ("add_layer_norm", "mlp", "bias_dropout_add"),
    "level": "O2",
    "obstacle": lambda layer: feed_forward.obstacle(layer, _NAMES),
    "absorbs": _NAMES,
    "calls": _called,
}

RULES = (
    attention_rule(modeling_whisper.WhisperAttention, __name__),
    residual_norm.layer_rule(
        modeling_whisper.WhisperEncoderLayer,
        __name__,
        _EncoderLayer,
        norms=("final_layer_norm",),
        **_FEED_FORWARD,
    ),
    residual_norm.layer_rule(
        modeling_whisper.WhisperDecoderLayer,
        __name__,
        _DecoderLayer,
        norms=("encoder_attn_layer_norm", "final_layer_norm"),
        **_FEED_FORWARD,
    ),
)
