"""Rules for GPT-2: the attention between its linear layers, and in the block residual sum + norm.

The MLP is known by its code.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt2 import modeling_gpt2

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule


def _block(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None,
    encoder_attention_mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    if encoder_hidden_states is not None:
        output: torch.Tensor = self.fused_rule.original.forward(
            self,
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            **options,
        )
        return output
    attended, _ = self.attn(self.ln_1(hidden_states), **options)
    normed, residual = add_norm(attended, hidden_states, self.ln_2)
    return residual + self.mlp(normed)


RULES = (
    attention_rule(modeling_gpt2.GPT2Attention, __name__, ("attn_dropout",)),
    layer_rule(modeling_gpt2.GPT2Block, __name__, _block, norms=("ln_2",)),
)
