"""Rules for DistilBERT: attention, and in the block dropout + residual sum + norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.distilbert import modeling_distilbert

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule


class _Block(nn.Module):
    """The block with residual sum and norm in one pass, and the MLP's dropout where it can be."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the hidden states after the block."""
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states, _ = residual_norm.add_norm(attended, hidden_states, self.sa_layer_norm)
        with residual_norm.deferred(self.ffn, "dropout", _FFNS) as dropout_p:
            output = self.ffn(hidden_states)
        hidden_states, _ = residual_norm.add_norm(
            output, hidden_states, self.output_layer_norm, dropout_p
        )
        return hidden_states


_FFNS = (modeling_distilbert.FFN,)


RULES = (
    attention_rule(modeling_distilbert.DistilBertSelfAttention, __name__, ("dropout",)),
    residual_norm.layer_rule(
        modeling_distilbert.TransformerBlock,
        __name__,
        _Block,
        ("add_layer_norm",),
        norms=("sa_layer_norm", "output_layer_norm"),
        absorbs=("ffn.dropout",),
        note=lambda block: residual_norm.deferral_note([(block.ffn, "dropout")], _FFNS),
    ),
)
