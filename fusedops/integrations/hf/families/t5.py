"""Rules for T5: norms, attention, and dropout + residual sum. Its MLPs are known by their code.

T5's scores are not scaled, and a learned bias of the relative position is added to them: the
attention's function gets both. Its norm is Llama's where weight and input have one dtype, else it
stays: it does not round to the input's dtype. Not fused: a residual sum with the norm after it,
which belongs to the next sublayer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.t5 import modeling_t5

from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    Plan,
    Refusal,
    always,
    copyable,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.ops.rms_norm import rms_norm


class _LayerNorm(nn.Module):
    """T5's root-mean-square norm as one op."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised and scaled input."""
        dtype = hidden_states.dtype
        # T5 has float32 statistics for float64 too, the op has not.
        fits = dtype == self.weight.dtype != torch.float64
        if not fits or not runs_here(hidden_states):
            return super().forward(hidden_states)
        shape, eps = self.weight.shape, self.variance_epsilon
        return rms_norm(hidden_states, shape, self.weight, eps, rounding="hf")


class _LayerFF(nn.Module):
    """The feed-forward sublayer with dropout and residual sum in one pass."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the sublayer."""
        return _summed(self, self.DenseReluDense(self.layer_norm(hidden_states)), hidden_states)


class _LayerSelfAttention(nn.Module):
    """The sublayer of self-attention with dropout and residual sum in one pass."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return the residual stream, the position bias and the attention's weights."""
        attended, *rest = self.SelfAttention(
            self.layer_norm(hidden_states),
            mask=attention_mask,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        return _summed(self, attended, hidden_states), *rest


class _LayerCrossAttention(nn.Module):
    """The sublayer of cross-attention with dropout and residual sum in one pass."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return the residual stream, the position bias and the attention's weights."""
        attended, *rest = self.EncDecAttention(
            self.layer_norm(hidden_states),
            mask=attention_mask,
            key_value_states=key_value_states,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        return _summed(self, attended, hidden_states), *rest


def _summed(sublayer: Any, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the residual stream after the sublayer's dropout."""
    return bias_dropout_add(branch, None, residual, residual_norm.probability(sublayer.dropout))


@copyable
def _norm_rule(original: type[nn.Module], module_name: str) -> PatchRule:
    """Return the rule for the norm."""
    patched = subclass(original, _LayerNorm, module_name)
    return PatchRule(original, patched, "O1", always("rms_norm"))


@copyable
def _sublayer_rule(
    original: type[nn.Module], module_name: str, forward: type[nn.Module]
) -> PatchRule:
    """Return the rule for a sublayer, whose dropout and residual sum are one op."""
    unknown = residual_norm.unknown_forward(forward, original)

    def obstacle(module: Any) -> str | None:
        reason = residual_norm.dropout_obstacle("dropout", module.dropout)
        return reason or global_hooks() or unknown

    plan = Plan(("bias_dropout_add",), ("dropout",))

    def plan_of(module: Any) -> Plan | Refusal:
        reason = obstacle(module)
        return plan if reason is None else Refusal(reason)

    patched = subclass(original, residual_norm.with_names(forward, original), module_name)
    return PatchRule(original, patched, "O1", plan_of, guarded=True)


RULES = (
    attention_rule(modeling_t5.T5Attention, __name__),
    _norm_rule(modeling_t5.T5LayerNorm, __name__),
    _sublayer_rule(modeling_t5.T5LayerFF, __name__, _LayerFF),
    _sublayer_rule(modeling_t5.T5LayerSelfAttention, __name__, _LayerSelfAttention),
    _sublayer_rule(modeling_t5.T5LayerCrossAttention, __name__, _LayerCrossAttention),
)
