"""Rules for GPT-2: blocks of LayerNorm, attention, LayerNorm, MLP with dropout on each branch.

Replaced are the attention between its linear layers (``attention.py``) and, in the block, dropout +
residual sum + the norm after it. The MLP is known by its code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gpt2 import modeling_gpt2

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.ops.bias_dropout_add import bias_dropout_add


class _Block(nn.Module):
    """GPT-2's block with dropout, residual sum and norm in one pass, where they meet."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the block."""
        if encoder_hidden_states is not None:
            return super().forward(
                hidden_states,
                past_key_values,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                use_cache,
                **kwargs,
            )
        with residual_norm.deferred(self.attn, "resid_dropout", _BRANCHES) as dropout_p:
            attn_output, _ = self.attn(
                self.ln_1(hidden_states),
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                use_cache=use_cache,
                **kwargs,
            )
        normed, residual = residual_norm.add_norm(attn_output, hidden_states, self.ln_2, dropout_p)
        with residual_norm.deferred(self.mlp, "dropout", _BRANCHES) as dropout_p:
            output = self.mlp(normed)
        return bias_dropout_add(output, None, residual, dropout_p)


_BRANCHES = (modeling_gpt2.GPT2Attention, modeling_gpt2.GPT2MLP)


def _block_note(block: Any) -> str | None:
    branches = ((block.attn, "resid_dropout"), (block.mlp, "dropout"))
    return residual_norm.deferral_note(branches, _BRANCHES)


RULES = (
    attention_rule(modeling_gpt2.GPT2Attention, __name__, ("attn_dropout",)),
    residual_norm.layer_rule(
        modeling_gpt2.GPT2Block,
        __name__,
        _Block,
        ("add_layer_norm", "bias_dropout_add"),
        norms=("ln_2",),
        absorbs=("attn.resid_dropout", "mlp.dropout"),
        note=_block_note,
    ),
)
