"""Rules for GPT-2: blocks of LayerNorm, attention, LayerNorm, MLP with dropout on each branch.

Replaced are the MLP (one op), the attention between its linear layers (``attention.py``), these
layers, which are ``Conv1D`` (``transformers_modules.py``), and, in the block, dropout + residual
sum + the norm after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.models.gpt2 import modeling_gpt2

from fusedops.integrations.hf.attention import attention_rule
from fusedops.integrations.hf.rules import Rule, bypass_obstacle, global_hooks, runs_here
from fusedops.integrations.hf.torch_modules import LayerNorm, enough_rows
from fusedops.integrations.hf.transformers_modules import (
    activation_name,
    activation_obstacle,
    conv1d_obstacle,
)
from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.ops.mlp import mlp

_NORMS = (nn.LayerNorm, LayerNorm)


class GPT2MLP(modeling_gpt2.GPT2MLP):
    """GPT-2's feed-forward layer as one op."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the dropped-out output of the layer."""
        if (
            not runs_here(hidden_states)
            or not enough_rows(hidden_states)
            or mlp_obstacle(self) is not None
        ):
            return super().forward(hidden_states)
        return self.dropout(before_dropout(self, hidden_states))


def before_dropout(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what a ``GPT2MLP`` computes up to its dropout. ``Conv1D`` weights are [in, out]."""
    activation = activation_name(module.act)
    assert activation is not None
    return mlp(
        hidden_states,
        module.c_fc.weight.t(),
        module.c_fc.bias,
        module.c_proj.weight.t(),
        module.c_proj.bias,
        activation=activation,
    )


def mlp_obstacle(module: Any) -> str | None:
    """Return why the MLP cannot run as one op now, or ``None``."""
    return (
        conv1d_obstacle("c_fc", module.c_fc)
        or conv1d_obstacle("c_proj", module.c_proj)
        or activation_obstacle("act", module.act)
        or global_hooks()
    )


class GPT2Block(modeling_gpt2.GPT2Block):
    """GPT-2's block with dropout, residual sum and norm in one pass, where they meet."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the block."""
        if (
            encoder_hidden_states is not None
            or not runs_here(hidden_states)
            or _block_obstacle(self) is not None
        ):
            return super().forward(
                hidden_states,
                past_key_values,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                use_cache,
                **kwargs,
            )
        with _deferred(self.attn, "resid_dropout") as dropout_p:
            attn_output, _ = self.attn(
                self.ln_1(hidden_states),
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                use_cache=use_cache,
                **kwargs,
            )
        norm = self.ln_2
        normed, residual = add_layer_norm(
            attn_output,
            hidden_states,
            norm.normalized_shape,
            norm.weight,
            norm.bias,
            norm.eps,
            dropout_p=dropout_p,
        )
        with _deferred(self.mlp, "dropout") as dropout_p:
            feed_forward = self.mlp(normed)
        return bias_dropout_add(feed_forward, None, residual, dropout_p)


@contextmanager
def _deferred(branch: Any, name: str) -> Iterator[float]:
    """Let ``branch`` run without the dropout at its end; yield the probability left to do.

    Where somebody would see the difference (hooks on either), the dropout stays where it is and
    the probability is 0. The flag belongs to the module: two threads must not run one model in
    training at the same time.
    """
    if not branch.training or _deferral_obstacle(branch, name) is not None:
        yield 0.0
        return
    dropout = getattr(branch, name)
    if not dropout.training or dropout.p == 0.0:
        yield 0.0
        return
    dropout.training = False
    try:
        yield dropout.p
    finally:
        dropout.training = True


def _deferral_obstacle(branch: Any, name: str) -> str | None:
    """Return why the dropout at the end of ``branch`` must stay there, or ``None``."""
    return bypass_obstacle(type(branch).__name__, branch, _BRANCHES) or bypass_obstacle(
        name, getattr(branch, name), (nn.Dropout,)
    )


_ATTENTION = attention_rule(modeling_gpt2.GPT2Attention, __name__, ("attn_dropout",))
GPT2Attention = _ATTENTION.patched

_BRANCHES = (modeling_gpt2.GPT2Attention, GPT2Attention, modeling_gpt2.GPT2MLP, GPT2MLP)


def _block_obstacle(block: Any) -> str | None:
    """Return why the block cannot run in its fused form now, or ``None``."""
    return bypass_obstacle("ln_2", block.ln_2, _NORMS) or global_hooks() or _UNKNOWN_BLOCK


def _unknown_block() -> str | None:
    """Return why transformers' block is not the one that this file was written for."""
    known = list(inspect.signature(GPT2Block.forward).parameters)
    found = list(inspect.signature(modeling_gpt2.GPT2Block.forward).parameters)
    if found == known:
        return None
    return f"this transformers has another GPT2Block.forward({', '.join(found[1:])})"


_UNKNOWN_BLOCK = _unknown_block()


def _block_note(block: Any) -> str | None:
    """Return which dropouts are not fused, if they would have work."""
    reasons = [
        reason
        for branch, name in ((block.attn, "resid_dropout"), (block.mlp, "dropout"))
        if (reason := _deferral_obstacle(branch, name)) is not None
    ]
    return f"dropout not fused: {'; '.join(reasons)}" if reasons else None


def _probe_mlp(module: Any) -> None:
    before_dropout(module, module.c_fc.weight.new_zeros(1, module.c_fc.weight.shape[0]))


def _probe_block(block: Any) -> None:
    norm = block.ln_2
    row = norm.weight.new_zeros((1, *norm.normalized_shape))
    add_layer_norm(row, row, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


RULES = (
    _ATTENTION,
    Rule(
        modeling_gpt2.GPT2Block,
        GPT2Block,
        ("add_layer_norm", "bias_dropout_add"),
        "O1",
        _probe_block,
        _block_obstacle,
        absorbs=("ln_2", "attn.resid_dropout", "mlp.dropout"),
        note=_block_note,
    ),
    Rule(
        modeling_gpt2.GPT2MLP,
        GPT2MLP,
        ("mlp",),
        "O2",
        _probe_mlp,
        mlp_obstacle,
        absorbs=("c_fc", "act", "c_proj"),
    ),
)
