"""Rules for T5, plain and gated: norms, attention, feed-forward layers, dropout + residual sum.

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

from fusedops.integrations.hf.rules import feed_forward, gated_mlp, residual_norm, rms_norms
from fusedops.integrations.hf.rules.activations import activation_name, known_activation
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    copyable,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.rules.torch_modules import linear_obstacle
from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.rms_norm import rms_norm


class _LayerNorm(nn.Module):
    """T5's root-mean-square norm as one op."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised and scaled input."""
        dtype = hidden_states.dtype
        # T5 has float32 statistics for float64 too, the op has not.
        if not runs_here(hidden_states) or dtype != self.weight.dtype or dtype == torch.float64:
            return super().forward(hidden_states)
        shape, eps = self.weight.shape, self.variance_epsilon
        return rms_norm(hidden_states, shape, self.weight, eps, rounding="hf")


_NAMES = feed_forward.Names("wi", "act", "wo")


class _DenseActDense(nn.Module):
    """T5's feed-forward layer as one op; as two while its inner dropout has work."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        if not _called_by_plain(self):
            return feed_forward.fused(self, _NAMES, hidden_states)
        return _rest(self, feed_forward.dense_act(self.wi, self.act, hidden_states))


class _DenseGatedActDense(nn.Module):
    """T5's gated feed-forward layer, both products and the gate in one op."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        name = known_activation(self.act)
        gate, up = self.wi_0.weight, self.wi_1.weight
        return _rest(self, linear_glu(hidden_states, gate, up, activation=name))


def _rest(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what follows the activation: dropout and the second product, in its weight's dtype."""
    hidden_states = module.dropout(hidden_states)
    weight = module.wo.weight
    if hidden_states.dtype != weight.dtype and weight.dtype != torch.int8:
        hidden_states = hidden_states.to(weight.dtype)
    return module.wo(hidden_states)


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


def _plain_obstacle(module: Any) -> str | None:
    return residual_norm.dropout_obstacle("dropout", module.dropout) or feed_forward.obstacle(
        module, _NAMES
    )


def _called_by_plain(module: Any) -> tuple[str, ...]:
    """Return the children that a plain layer calls now: half of it may be kept in float32."""
    if (
        residual_norm.probability(module.dropout) == 0.0
        and module.wi.weight.dtype == module.wo.weight.dtype
    ):
        return ()
    return ("dropout", "wo")


def _gated_obstacle(module: Any) -> str | None:
    reason = linear_obstacle("wi_1", module.wi_1) or feed_forward.dense_act_obstacle(
        module, "wi_0", "act"
    )
    if reason is None and activation_name(module.act) not in gated_mlp.GATES:
        reason = f"act is a {type(module.act).__name__}, which is no activation of linear_glu"
    return reason


@copyable
def _rule(
    original: type[nn.Module],
    module_name: str,
    forward: type[nn.Module],
    ops: tuple[str, ...],
    level: str,
    **options: Any,
) -> PatchRule:
    """Return the rule for a class of which ``forward`` has the fused forward."""
    return PatchRule(original, subclass(original, forward, module_name), ops, level, **options)


@copyable
def _sublayer_rule(
    original: type[nn.Module], module_name: str, forward: type[nn.Module]
) -> PatchRule:
    """Return the rule for a sublayer, whose dropout and residual sum are one op."""
    unknown = residual_norm.unknown_forward(forward, original)

    def obstacle(module: Any) -> str | None:
        reason = residual_norm.dropout_obstacle("dropout", module.dropout)
        return reason or global_hooks() or unknown

    return PatchRule(
        original,
        subclass(original, forward, module_name),
        ("bias_dropout_add",),
        "O1",
        obstacle=obstacle,
        absorbs=("dropout",),
        guarded=True,
    )


RULES = (
    attention_rule(modeling_t5.T5Attention, __name__),
    _rule(
        modeling_t5.T5LayerNorm,
        __name__,
        _LayerNorm,
        ("rms_norm",),
        "O1",
        probe=rms_norms.probe_norm,
    ),
    _sublayer_rule(modeling_t5.T5LayerFF, __name__, _LayerFF),
    _sublayer_rule(modeling_t5.T5LayerSelfAttention, __name__, _LayerSelfAttention),
    _sublayer_rule(modeling_t5.T5LayerCrossAttention, __name__, _LayerCrossAttention),
    _rule(
        modeling_t5.T5DenseActDense,
        __name__,
        _DenseActDense,
        ("mlp", "linear_act"),
        "O2",
        obstacle=_plain_obstacle,
        absorbs=("wi", "act", "dropout", "wo"),
        calls=_called_by_plain,
        guarded=True,
    ),
    _rule(
        modeling_t5.T5DenseGatedActDense,
        __name__,
        _DenseGatedActDense,
        ("linear_glu",),
        "O2",
        obstacle=_gated_obstacle,
        absorbs=("wi_0", "wi_1", "act"),
        guarded=True,
    ),
)
