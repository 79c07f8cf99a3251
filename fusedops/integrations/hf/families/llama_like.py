"""Rules for the families that are Llama under other names, with a few differences.

A decoder layer is norm, attention, residual sum, norm, gated feed-forward layer, residual sum.
Gemma 2 and Phi-3 have more norms or dropouts. Gemma 2's attention caps the scores where it is
configured as ``eager``; ``sdpa`` leaves the cap out.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf import patched
from fusedops.integrations.hf.rules import residual_norm, rms_norms
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    Plan,
    Refusal,
    copyable,
    global_hooks,
    subclass,
)


class _Layer(nn.Module):
    """A decoder layer's work, whatever the order of its arguments.

    ``absorbs`` names the norm after the first residual sum, which is computed in one pass with it,
    and the dropout before the sum where there is one.
    """

    absorbs: tuple[str, ...] = ("post_attention_layernorm",)

    def _residuals(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        norm = self.post_attention_layernorm
        normed, residual = rms_norms.add_norm(attended, hidden_states, norm)
        output = self.mlp(normed)
        # A layer of experts may also return its router's scores.
        return residual + (output[0] if isinstance(output, tuple) else output)


class DecoderLayer(_Layer):
    """Llama's decoder layer with the first residual sum and the norm after it in one pass."""

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
        return self._residuals(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )


class PositionsFirst(_Layer):
    """The same layer where the rotary tables are the second argument (Mixtral, Gemma 2)."""

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
        return self._residuals(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


class _Gemma2Layer(PositionsFirst):
    """Gemma 2's layer, with norms behind attention and feed-forward layer as well."""

    absorbs = ("pre_feedforward_layernorm",)

    def _residuals(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        attended = self.post_attention_layernorm(attended)
        norm = self.pre_feedforward_layernorm
        normed, residual = rms_norms.add_norm(attended, hidden_states, norm)
        return residual + self.post_feedforward_layernorm(self.mlp(normed))


class _Phi3Layer(DecoderLayer):
    """Phi-3's layer, with dropout on each branch."""

    absorbs = ("post_attention_layernorm", "resid_attn_dropout")

    def _residuals(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        dropout_p = residual_norm.probability(self.resid_attn_dropout)
        norm = self.post_attention_layernorm
        normed, residual = rms_norms.add_norm(attended, hidden_states, norm, dropout_p)
        return residual + self.resid_mlp_dropout(self.mlp(normed))


# Family -> what its classes' names begin with, and the forward of its decoder layer.
FAMILIES: dict[str, tuple[str, type[_Layer]]] = {
    "llama": ("Llama", DecoderLayer),
    "mistral": ("Mistral", DecoderLayer),
    "qwen2": ("Qwen2", DecoderLayer),
    "qwen3": ("Qwen3", DecoderLayer),
    "gemma": ("Gemma", DecoderLayer),
    "gemma2": ("Gemma2", _Gemma2Layer),
    "phi3": ("Phi3", _Phi3Layer),
}


@copyable
def layer_rule(original: type[nn.Module], module_name: str, forward: type[_Layer]) -> PatchRule:
    """Return the rule for a decoder layer, which refuses where this transformers has another."""
    unknown = residual_norm.unknown(forward, original)
    norm, *dropouts = forward.absorbs

    def obstacle(layer: Any) -> str | None:
        reason = unknown or rms_norms.norm_obstacle(norm, getattr(layer, norm))
        for name in dropouts:
            reason = reason or residual_norm.dropout_obstacle(name, getattr(layer, name))
        return reason or global_hooks()

    plan = Plan(("add_rms_norm",), forward.absorbs)

    def plan_of(layer: Any) -> Plan | Refusal:
        reason = obstacle(layer)
        return plan if reason is None else Refusal(reason)

    patched_class = subclass(original, residual_norm.with_names(forward, original), module_name)
    return PatchRule(original, patched_class, "O1", plan_of, guarded=True)


def rules(name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's attention and decoder layer."""
    family: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    prefix, forward = FAMILIES[name]
    attention, layer = (
        getattr(family, f"{prefix}{kind}") for kind in ("Attention", "DecoderLayer")
    )
    module_name = patched.module_of(layer)
    return (
        attention_rule(attention, module_name, eager=True, rotary=True),
        layer_rule(layer, module_name, forward),
    )
