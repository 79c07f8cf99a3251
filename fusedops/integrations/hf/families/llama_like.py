"""The decoder layers of Llama and of all families that copy it, dense and with experts.

A layer is norm, attention, residual sum, norm, feed-forward layer, residual sum. Gemma 2 and Phi-3
have more norms or dropouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusedops.integrations.hf.rules.residual_norm import (
    ResidualLayer,
    add_norm,
    layer_rule,
    probability,
)
from fusedops.ops._routing_reuse import keep_routing

_CHECKPOINT = "_gradient_checkpointing_func"


class _KeepsRouting(ResidualLayer):
    """A layer whose recomputation under gradient checkpointing routes as its first run."""

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        """What transformers has set, given a function that keeps its routing."""
        checkpoint = self.__dict__.get(_CHECKPOINT)
        if checkpoint is None:
            raise AttributeError(_CHECKPOINT)
        if torch.compiler.is_compiling():  # there routing_contexts keeps it
            return checkpoint
        return lambda function, *args: checkpoint(keep_routing(function), *args)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self.__dict__[_CHECKPOINT] = checkpoint

    @_gradient_checkpointing_func.deleter
    def _gradient_checkpointing_func(self) -> None:
        del self.__dict__[_CHECKPOINT]


def _llama(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    normed, residual = add_norm(attended, hidden_states, self.post_attention_layernorm)
    output = self.mlp(normed)
    # A layer of experts may also return its router's scores.
    return residual + (output[0] if isinstance(output, tuple) else output)


def _gemma2(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    attended = self.post_attention_layernorm(attended)
    normed, residual = add_norm(attended, hidden_states, self.pre_feedforward_layernorm)
    return residual + self.post_feedforward_layernorm(self.mlp(normed))


def _phi3(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    dropout_p = probability(self.resid_attn_dropout)
    norm = self.post_attention_layernorm
    normed, residual = add_norm(attended, hidden_states, norm, dropout_p)
    return residual + self.resid_mlp_dropout(self.mlp(normed))


_RULE = partial(layer_rule, compute=_llama, norms=("post_attention_layernorm",), base=_KeepsRouting)
RULES = {
    "LlamaDecoderLayer": _RULE,
    "MixtralDecoderLayer": _RULE,
    "GptOssDecoderLayer": _RULE,
    "Gemma2DecoderLayer": partial(
        layer_rule, compute=_gemma2, norms=("pre_feedforward_layernorm",)
    ),
    "Phi3DecoderLayer": partial(
        layer_rule,
        compute=_phi3,
        norms=("post_attention_layernorm",),
        dropouts=("resid_attn_dropout",),
    ),
}
