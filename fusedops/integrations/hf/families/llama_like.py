"""Rules for the families that are Llama under other names, with a few differences.

A decoder layer is norm, attention, residual sum, norm, gated feed-forward layer, residual sum.
Gemma 2 and Phi-3 have more norms or dropouts. Gemma 2's attention caps the scores where it is
configured as ``eager``; ``sdpa`` leaves the cap out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf import patched
from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import ResidualLayer, add_norm, probability
from fusedops.integrations.hf.rules.rule import PatchRule


def decoder_layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the residual stream after Llama's decoder layer."""
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    normed, residual = add_norm(attended, hidden_states, self.post_attention_layernorm)
    output = self.mlp(normed)
    # A layer of experts may also return its router's scores.
    return residual + (output[0] if isinstance(output, tuple) else output)


def _gemma2_layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the same with norms behind attention and feed-forward layer as well."""
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    attended = self.post_attention_layernorm(attended)
    normed, residual = add_norm(attended, hidden_states, self.pre_feedforward_layernorm)
    return residual + self.post_feedforward_layernorm(self.mlp(normed))


def _phi3_layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the same with dropout on each branch."""
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    dropout_p = probability(self.resid_attn_dropout)
    norm = self.post_attention_layernorm
    normed, residual = add_norm(attended, hidden_states, norm, dropout_p)
    return residual + self.resid_mlp_dropout(self.mlp(normed))


# Family -> what its classes' names begin with.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "phi3": "Phi3",
}

# Forward of a decoder layer -> the norm behind its first sum, and the dropout before the sum.
_ABSORBED: dict[Callable[..., Any], Any] = {
    decoder_layer: {"norms": ("post_attention_layernorm",)},
    _gemma2_layer: {"norms": ("pre_feedforward_layernorm",)},
    _phi3_layer: {"norms": ("post_attention_layernorm",), "dropouts": ("resid_attn_dropout",)},
}
_LAYERS = {"gemma2": _gemma2_layer, "phi3": _phi3_layer}


def layer_rule(
    original: type[nn.Module],
    module_name: str,
    forward: Callable[..., Any] = decoder_layer,
    base: type[ResidualLayer] = ResidualLayer,
) -> PatchRule:
    """Return the rule for a decoder layer."""
    absorbed = _ABSORBED[forward]
    return residual_norm.layer_rule(original, module_name, forward, base=base, **absorbed)


def rules(name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's attention and decoder layer."""
    family: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    attention, layer = (
        getattr(family, f"{FAMILIES[name]}{kind}") for kind in ("Attention", "DecoderLayer")
    )
    module_name = patched.module_of(layer)
    return (
        attention_rule(attention, module_name, eager=True, rotary=True),
        layer_rule(layer, module_name, _LAYERS.get(name, decoder_layer)),
    )
