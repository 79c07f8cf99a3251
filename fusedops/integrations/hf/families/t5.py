"""T5's norm, and its sublayers with dropout + residual sum.

Its norm is Llama's where weight and input have one dtype, else it
stays: it does not round to the input's dtype. Not fused: a residual sum with the norm after it,
which belongs to the next sublayer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusedops.integrations.hf.rules.norms import norm_rule
from fusedops.integrations.hf.rules.recognition import NormExpression
from fusedops.integrations.hf.rules.residual_norm import layer_rule, probability
from fusedops.integrations.hf.symbolic import Path
from fusedops.ops.bias_dropout_add import bias_dropout_add

_NORM = NormExpression(
    "rms_norm",
    weight=("attribute", "weight"),
    eps=("attribute", "variance_epsilon"),
    rounding="hf",
    one_dtype=True,
)


def _feed_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _summed(self, self.DenseReluDense(self.layer_norm(hidden_states)), hidden_states)


def _sublayer(attention: str) -> Callable[..., Any]:
    """Return the forward of a sublayer of self-attention or of cross-attention."""

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Any, ...]:
        normed = self.layer_norm(hidden_states)
        attended, *rest = getattr(self, attention)(normed, mask=attention_mask, **options)
        return _summed(self, attended, hidden_states), *rest

    return forward


def _summed(sublayer: Any, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the residual stream after the sublayer's dropout."""
    return bias_dropout_add(branch, None, residual, probability(sublayer.dropout))


_RULE = partial(layer_rule, dropouts=("dropout",), ops=("bias_dropout_add",))
RULES = {
    "T5LayerNorm": partial(norm_rule, norms=[(Path(_NORM), _NORM)]),
    "T5LayerFF": partial(_RULE, compute=_feed_forward),
    "T5LayerSelfAttention": partial(_RULE, compute=_sublayer("SelfAttention")),
    "T5LayerCrossAttention": partial(_RULE, compute=_sublayer("EncDecAttention")),
}
