"""Rules for BERT: dense + activation as one op, dropout + residual sum + norm as another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.bert import modeling_bert

from fusedops.integrations.hf.rules import Rule, bypass_obstacle, global_hooks, runs_here
from fusedops.integrations.hf.torch_modules import LayerNorm, enough_rows, linear_obstacle
from fusedops.integrations.hf.transformers_modules import activation_name, activation_obstacle
from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.ops.linear_act import linear_act

_NORMS = (nn.LayerNorm, LayerNorm)


class _DropoutAddNorm(nn.Module):
    """``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``, all after the product in one."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the normalised sum."""
        if not runs_here(hidden_states) or _output_obstacle(self) is not None:
            return super().forward(hidden_states, input_tensor)
        module: Any = self
        norm = module.LayerNorm
        normed, _ = add_layer_norm(
            module.dense(hidden_states),
            input_tensor,
            norm.normalized_shape,
            norm.weight,
            norm.bias,
            norm.eps,
            dropout_p=module.dropout.p,
            training=module.dropout.training,
        )
        return normed


class BertSelfOutput(_DropoutAddNorm, modeling_bert.BertSelfOutput):
    """The end of BERT's attention."""


class BertOutput(_DropoutAddNorm, modeling_bert.BertOutput):
    """The end of BERT's feed-forward layer."""


class BertIntermediate(modeling_bert.BertIntermediate):
    """The beginning of BERT's feed-forward layer."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return ``activation(dense(hidden_states))``."""
        if not _fits(hidden_states) or _intermediate_obstacle(self) is not None:
            return super().forward(hidden_states)
        return _dense_act(self, self.intermediate_act_fn, hidden_states)


class BertPredictionHeadTransform(modeling_bert.BertPredictionHeadTransform):
    """The layer before BERT's vocabulary projection."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return ``LayerNorm(activation(dense(hidden_states)))``."""
        if not _fits(hidden_states) or _transform_obstacle(self) is not None:
            return super().forward(hidden_states)
        return self.LayerNorm(_dense_act(self, self.transform_act_fn, hidden_states))


def _fits(hidden_states: torch.Tensor) -> bool:
    return runs_here(hidden_states) and enough_rows(hidden_states)


def _dense_act(module: Any, activation: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    name = activation_name(activation)
    assert name is not None
    return linear_act(hidden_states, module.dense.weight, module.dense.bias, activation=name)


def _output_obstacle(module: Any) -> str | None:
    return (
        bypass_obstacle("LayerNorm", module.LayerNorm, _NORMS)
        or bypass_obstacle("dropout", module.dropout, (nn.Dropout,))
        or global_hooks()
    )


def _intermediate_obstacle(module: Any) -> str | None:
    return (
        linear_obstacle("dense", module.dense)
        or activation_obstacle("intermediate_act_fn", module.intermediate_act_fn)
        or global_hooks()
    )


def _transform_obstacle(module: Any) -> str | None:
    return (
        linear_obstacle("dense", module.dense)
        or activation_obstacle("transform_act_fn", module.transform_act_fn)
        or global_hooks()
    )


def _probe_output(module: Any) -> None:
    norm = module.LayerNorm
    row = norm.weight.new_zeros((1, *norm.normalized_shape))
    add_layer_norm(row, row, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _probe_dense(module: Any) -> None:
    dense = module.dense
    linear_act(dense.weight.new_zeros(1, dense.in_features), dense.weight, activation="gelu")


def _output_rule(original: type[nn.Module], patched: type[nn.Module]) -> Rule:
    return Rule(
        original,
        patched,
        ("add_layer_norm",),
        "O1",
        _probe_output,
        _output_obstacle,
        absorbs=("LayerNorm", "dropout"),
    )


RULES = (
    _output_rule(modeling_bert.BertSelfOutput, BertSelfOutput),
    _output_rule(modeling_bert.BertOutput, BertOutput),
    Rule(
        modeling_bert.BertIntermediate,
        BertIntermediate,
        ("linear_act",),
        "O2",
        _probe_dense,
        _intermediate_obstacle,
        absorbs=("dense", "intermediate_act_fn"),
    ),
    Rule(
        modeling_bert.BertPredictionHeadTransform,
        BertPredictionHeadTransform,
        ("linear_act",),
        "O2",
        _probe_dense,
        _transform_obstacle,
        absorbs=("dense", "transform_act_fn"),
    ),
)
