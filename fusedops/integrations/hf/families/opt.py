"""The layers of OPT, which hold their feed-forward layer and dropouts themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule
from fusedops.ops.bias_dropout_add import bias_dropout_add

_STEPS = ("fc1", "activation_fn", "fc2")


def _opt(
    self: Any, hidden_states: torch.Tensor, use_cache: bool | None, **options: Any
) -> torch.Tensor:
    dropout_p = self.dropout if self.training else 0.0
    first, second = self.self_attn_layer_norm, self.final_layer_norm
    if not self.do_layer_norm_before:
        attended, _ = self.self_attn(hidden_states=hidden_states, **options)
        normed, _ = add_norm(attended, hidden_states, first, dropout_p)
        return add_norm(_feed_forward(self, normed), normed, second, dropout_p)[0]
    attended, _ = self.self_attn(hidden_states=first(hidden_states), **options)
    normed, residual = add_norm(attended, hidden_states, second, dropout_p)
    return bias_dropout_add(_feed_forward(self, normed), None, residual, dropout_p)


def _feed_forward(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    rows = hidden_states.reshape(-1, hidden_states.size(-1))  # as the original calls the children
    return chain.run(layer, _STEPS, rows).view(hidden_states.shape)


def _opt_norms(layer: Any) -> tuple[str, ...]:
    first = () if layer.do_layer_norm_before else ("self_attn_layer_norm",)
    return (*first, "final_layer_norm")


RULES = {
    "OPTDecoderLayer": partial(
        layer_rule,
        compute=_opt,
        norms=_opt_norms,
        ops=("bias_dropout_add",),
        feed_forward=_STEPS,
    ),
}
