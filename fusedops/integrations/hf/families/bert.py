"""The end of attention and of the feed-forward layer in BERT and in the families that copy it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule, probability


def _output(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    """Return ``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``."""
    branch = self.dense(hidden_states)
    return add_norm(branch, input_tensor, self.LayerNorm, probability(self.dropout))[0]


RULES = {
    "BertSelfOutput": partial(
        layer_rule, compute=_output, norms=("LayerNorm",), dropouts=("dropout",)
    ),
}
