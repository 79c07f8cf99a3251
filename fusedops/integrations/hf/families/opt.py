"""Rules for OPT, whose feed-forward layer and dropouts are in the decoder layer's own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.opt import modeling_opt

from fusedops.integrations.hf.rules import feed_forward, residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    Plan,
    Refusal,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.ops.bias_dropout_add import bias_dropout_add

_NAMES = feed_forward.Names()


class _DecoderLayer(nn.Module):
    """The decoder layer: each dropout and residual sum in one pass, with the norm if it follows."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        options = dict(
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **kwargs,
        )
        dropout_p = self.dropout if self.training else 0.0
        first, second = self.self_attn_layer_norm, self.final_layer_norm
        if not self.do_layer_norm_before:
            attended, _ = self.self_attn(hidden_states=hidden_states, **options)
            normed, _ = residual_norm.add_norm(attended, hidden_states, first, dropout_p)
            return residual_norm.add_norm(self._feed_forward(normed), normed, second, dropout_p)[0]
        attended, _ = self.self_attn(hidden_states=first(hidden_states), **options)
        normed, residual = residual_norm.add_norm(attended, hidden_states, second, dropout_p)
        return bias_dropout_add(self._feed_forward(normed), None, residual, dropout_p)

    def _feed_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if runs_here(hidden_states) and feed_forward.obstacle(self, _NAMES) is None:
            return feed_forward.fused(self, _NAMES, hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.size(-1))  # as the original calls them
        return self.fc2(self.activation_fn(self.fc1(rows))).view(hidden_states.shape)


def _layer_obstacle(layer: Any) -> str | None:
    reason = (
        residual_norm.norm_obstacle("final_layer_norm", layer.final_layer_norm) or global_hooks()
    )
    if reason is None and not layer.do_layer_norm_before:
        reason = residual_norm.norm_obstacle("self_attn_layer_norm", layer.self_attn_layer_norm)
    return reason


def _called(layer: Any) -> tuple[str, ...]:
    """Return the children that the fused forward calls."""
    apart = feed_forward.obstacle(layer, _NAMES) is not None
    return (
        *(("self_attn_layer_norm",) if layer.do_layer_norm_before else ()),
        *(_NAMES if apart else ()),
    )


def _plan(layer: Any) -> Plan | Refusal:
    reason = _UNKNOWN or _layer_obstacle(layer)
    if reason is not None:
        return Refusal(reason)
    reason = feed_forward.obstacle(layer, _NAMES)
    called = _called(layer)
    children = ("self_attn_layer_norm", "final_layer_norm", *_NAMES)
    ops = ("add_layer_norm", "bias_dropout_add")
    return Plan(
        ops if reason is not None else ("mlp", *ops),
        tuple(name for name in children if name not in called),
        f"without mlp: {reason}" if reason is not None else None,
    )


_ORIGINAL = modeling_opt.OPTDecoderLayer
_UNKNOWN = residual_norm.unknown(_DecoderLayer, _ORIGINAL)

RULES = (
    attention_rule(modeling_opt.OPTAttention, __name__, eager=True),
    PatchRule(
        _ORIGINAL,
        subclass(_ORIGINAL, residual_norm.with_names(_DecoderLayer, _ORIGINAL), __name__),
        "O2",
        _plan,
        guarded=True,
    ),
)
