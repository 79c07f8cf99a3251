"""Rules for GPT-2: blocks of LayerNorm, attention, LayerNorm, MLP with dropout on each branch.

Replaced are the MLP (one op), the attention between its linear layers (``attention.py``), these
layers, which are ``Conv1D`` (``transformers_modules.py``), and, in the block, dropout + residual
sum + the norm after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gpt2 import modeling_gpt2

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import PatchRule, global_hooks
from fusedops.integrations.hf.rules.transformers_modules import (
    activation_obstacle,
    conv1d_obstacle,
    known_activation,
)
from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.ops.mlp import mlp


class GPT2MLP(modeling_gpt2.GPT2MLP):
    """GPT-2's feed-forward layer as one op."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the dropped-out output of the layer."""
        first, second = self.c_fc, self.c_proj
        # The weights of Conv1D are [in, out].
        weights = (first.weight.t(), first.bias, second.weight.t(), second.bias)
        return self.dropout(mlp(hidden_states, *weights, activation=known_activation(self.act)))


def _mlp_obstacle(module: Any) -> str | None:
    """Return why the MLP cannot run as one op now, or ``None``."""
    return (
        conv1d_obstacle("c_fc", module.c_fc)
        or conv1d_obstacle("c_proj", module.c_proj)
        or activation_obstacle("act", module.act)
        or global_hooks()
    )


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


_ATTENTION = attention_rule(modeling_gpt2.GPT2Attention, __name__, ("attn_dropout",))
GPT2Attention = _ATTENTION.patched

_BRANCHES = (modeling_gpt2.GPT2Attention, GPT2Attention, modeling_gpt2.GPT2MLP, GPT2MLP)


def _block_note(block: Any) -> str | None:
    branches = ((block.attn, "resid_dropout"), (block.mlp, "dropout"))
    return residual_norm.deferral_note(branches, _BRANCHES)


RULES = (
    _ATTENTION,
    residual_norm.layer_rule(
        modeling_gpt2.GPT2Block,
        __name__,
        _Block,
        ("add_layer_norm", "bias_dropout_add"),
        norms=("ln_2",),
        absorbs=("attn.resid_dropout", "mlp.dropout"),
        note=_block_note,
    ),
    PatchRule(
        modeling_gpt2.GPT2MLP,
        GPT2MLP,
        ("mlp",),
        "O2",
        obstacle=_mlp_obstacle,
        absorbs=("c_fc", "act", "c_proj"),
        guarded=True,
    ),
)
