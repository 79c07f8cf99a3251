"""Layers of Hugging Face's families whose residual sums, norms and dropouts are fused.

``RULES`` has a function for each class whose code is listed in ``known_code.toml``: it makes the
rule of a class with that code. No model's file is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.activations import DropoutFunction
from fusedops.integrations.hf.rules.encoder_layer import encoder_layer_rule
from fusedops.integrations.hf.rules.gated_norms import GatedNorm, gated_norm_rule
from fusedops.integrations.hf.rules.norms import norm_rule
from fusedops.integrations.hf.rules.recognition import NormExpression
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule, probability
from fusedops.integrations.hf.rules.rule import PatchRule
from fusedops.integrations.hf.symbolic import Path
from fusedops.ops.bias_dropout_add import bias_dropout_add

# BERT: the end of attention and of the feed-forward layer.


def _bert_output(
    self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor
) -> torch.Tensor:
    """Return ``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``."""
    branch = self.dense(hidden_states)
    return add_norm(branch, input_tensor, self.LayerNorm, probability(self.dropout))[0]


# OPT and Whisper: their layers hold feed-forward layer and dropouts themselves.
_OPT_STEPS = ("fc1", "activation_fn", "fc2")
_INNER_DROPOUT = DropoutFunction(("attribute", "activation_dropout"))
_WHISPER_STEPS = ("fc1", "activation_fn", _INNER_DROPOUT, "fc2")


def _dropout_p(layer: Any) -> float:
    return layer.dropout if layer.training else 0.0


def _opt(
    self: Any, hidden_states: torch.Tensor, use_cache: bool | None, **options: Any
) -> torch.Tensor:
    first, second = self.self_attn_layer_norm, self.final_layer_norm
    if not self.do_layer_norm_before:
        attended, _ = self.self_attn(hidden_states=hidden_states, **options)
        normed, _ = add_norm(attended, hidden_states, first, _dropout_p(self))
        return add_norm(_opt_feed_forward(self, normed), normed, second, _dropout_p(self))[0]
    attended, _ = self.self_attn(hidden_states=first(hidden_states), **options)
    normed, residual = add_norm(attended, hidden_states, second, _dropout_p(self))
    return bias_dropout_add(_opt_feed_forward(self, normed), None, residual, _dropout_p(self))


def _opt_feed_forward(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    rows = hidden_states.reshape(-1, hidden_states.size(-1))  # as the original calls the children
    return chain.run(layer, _OPT_STEPS, rows).view(hidden_states.shape)


def _opt_norms(layer: Any) -> tuple[str, ...]:
    first = () if layer.do_layer_norm_before else ("self_attn_layer_norm",)
    return (*first, "final_layer_norm")


def _whisper_encoder_layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    normed = self.self_attn_layer_norm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **options)
    hidden_states = _after_attention(self, attended, hidden_states)
    if hidden_states.dtype == torch.float16:
        bound = torch.finfo(torch.float16).max - 1000
        hidden_states = hidden_states.clamp(-bound, bound)
    return hidden_states


def _whisper_decoder_layer(
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
    """Return the residual stream after the layer's last attention and its feed-forward layer."""
    dropout_p = _dropout_p(layer)
    normed, residual = add_norm(attended, hidden_states, layer.final_layer_norm, dropout_p)
    return bias_dropout_add(chain.run(layer, _WHISPER_STEPS, normed), None, residual, dropout_p)


# T5: a sublayer ends with dropout and residual sum. The norm behind it belongs to the next one. The
# norm does not round to the input's dtype, so that it is Llama's for weight and input of one dtype.
_T5_NORM = NormExpression(
    "rms_norm",
    weight=("attribute", "weight"),
    eps=("attribute", "variance_epsilon"),
    rounding="hf",
    one_dtype=True,
)


def _t5_feed_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _summed(self, self.DenseReluDense(self.layer_norm(hidden_states)), hidden_states)


def _t5_sublayer(attention: str) -> Callable[..., Any]:
    """Return the forward of a sublayer of self-attention or of cross-attention."""

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Any, ...]:
        normed = self.layer_norm(hidden_states)
        attended, *rest = getattr(self, attention)(normed, mask=attention_mask, **options)
        return _summed(self, attended, hidden_states), *rest

    return forward


def _summed(sublayer: Any, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return bias_dropout_add(branch, None, residual, probability(sublayer.dropout))


# Behind recurrent mixers.
_GATED_NORMS = {
    "MambaRMSNormGated": GatedNorm(norm_before_gate=False, promotes=True),
    "Zamba2RMSNormGated": GatedNorm(norm_before_gate=False, groups="group_size", promotes=True),
    "FalconH1RMSNormGated": GatedNorm(groups="n_groups", reshapes=True),
    "Qwen3NextRMSNormGated": GatedNorm(norm_before_gate=True),
    "Glm5NextTextRMSNormGated": GatedNorm(norm_before_gate=True),
}

_SUM = ("bias_dropout_add",)
_OPT = partial(layer_rule, feed_forward=_OPT_STEPS, ops=_SUM)
_T5 = partial(layer_rule, dropouts=("dropout",), ops=_SUM)
_WHISPER = partial(layer_rule, feed_forward=_WHISPER_STEPS, ops=_SUM)
RULES: dict[str, Callable[[type[nn.Module]], PatchRule]] = {
    "BertLayer": encoder_layer_rule,
    "BertSelfOutput": partial(
        layer_rule, compute=_bert_output, norms=("LayerNorm",), dropouts=("dropout",)
    ),
    "OPTDecoderLayer": partial(_OPT, compute=_opt, norms=_opt_norms),
    "T5LayerNorm": partial(norm_rule, norms=[(Path(_T5_NORM), _T5_NORM)]),
    "T5LayerFF": partial(_T5, compute=_t5_feed_forward),
    "T5LayerSelfAttention": partial(_T5, compute=_t5_sublayer("SelfAttention")),
    "T5LayerCrossAttention": partial(_T5, compute=_t5_sublayer("EncDecAttention")),
    "WhisperEncoderLayer": partial(
        _WHISPER, compute=_whisper_encoder_layer, norms=("final_layer_norm",)
    ),
    "WhisperDecoderLayer": partial(
        _WHISPER,
        compute=_whisper_decoder_layer,
        norms=("encoder_attn_layer_norm", "final_layer_norm"),
    ),
}
RULES |= {name: partial(gated_norm_rule, formula=norm) for name, norm in _GATED_NORMS.items()}
