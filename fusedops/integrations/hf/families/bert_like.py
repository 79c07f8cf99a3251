"""Rules for the modules that BERT's descendants copy: attention, its end, the feed-forward layer.

The copies differ in name only (``RobertaSelfOutput`` is ``BertSelfOutput``); a family's file names
its classes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.feed_forward import (
    dense_act,
    dense_act_obstacle,
    probe_dense_act,
)
from fusedops.integrations.hf.rules.lm_heads import head_rule
from fusedops.integrations.hf.rules.residual_norm import (
    add_norm,
    dropout_obstacle,
    norm_obstacle,
    probability,
    probe_add_norm,
)
from fusedops.integrations.hf.rules.rule import PatchRule, global_hooks, runs_here, subclass
from fusedops.integrations.hf.rules.torch_modules import linear_obstacle
from fusedops.ops.linear_act import linear_act


class _Output(nn.Module):
    """``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``, all after the product in one."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the normalised sum."""
        if not runs_here(hidden_states) or _output_obstacle(self) is not None:
            return super().forward(hidden_states, input_tensor)
        module: Any = self
        dropout_p = probability(module.dropout)
        normed, _ = add_norm(module.dense(hidden_states), input_tensor, module.LayerNorm, dropout_p)
        return normed


class _DenseAct(nn.Module):
    """``activation(dense(hidden_states))`` as one op."""

    activation_child: str

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the activations."""
        if not runs_here(hidden_states) or dense_act_obstacle(self, "dense", self.activation_child):
            return super().forward(hidden_states)
        activation = getattr(self, self.activation_child)
        return dense_act(self.dense, activation, hidden_states)


class _DenseActNorm(nn.Module):
    """``LayerNorm(activation(dense(hidden_states)))``, product and activation as one op."""

    activation_child: str

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised activations."""
        if not runs_here(hidden_states) or dense_act_obstacle(self, "dense", self.activation_child):
            return super().forward(hidden_states)
        module: Any = self
        activation = getattr(self, self.activation_child)
        return module.LayerNorm(dense_act(self.dense, activation, hidden_states))


class _LMHead(nn.Module):
    """``decoder(layer_norm(gelu(dense(features))))``; its GELU is a function."""

    def forward(self, features: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the scores of the vocabulary."""
        if not runs_here(features) or _head_obstacle(self) is not None:
            return super().forward(features, **kwargs)
        module: Any = self
        dense = module.dense
        hidden_states = linear_act(features, dense.weight, dense.bias, activation="gelu")
        return module.decoder(module.layer_norm(hidden_states))


def rules(family: ModuleType, prefix: str, module_name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's copies of BERT's modules.

    Args:
        family: the modeling file.
        prefix: what the classes' names begin with there, as ``"Bert"``.
        module_name: name of the module that will hold the patched classes (``by_name``).
    """
    return (
        attention_rule(getattr(family, f"{prefix}SelfAttention"), module_name, ("dropout",)),
        attention_rule(getattr(family, f"{prefix}CrossAttention"), module_name, ("dropout",)),
        *(
            PatchRule(
                original,
                subclass(original, _Output, module_name),
                ("add_layer_norm",),
                "O1",
                lambda module: probe_add_norm(module.LayerNorm),
                _output_obstacle,
                absorbs=("LayerNorm", "dropout"),
            )
            for original in (
                getattr(family, f"{prefix}SelfOutput"),
                getattr(family, f"{prefix}Output"),
            )
        ),
        _dense_act_rule(
            getattr(family, f"{prefix}Intermediate"),
            _DenseAct,
            module_name,
            "intermediate_act_fn",
        ),
    )


def roberta_rules(family: ModuleType, prefix: str, module_name: str) -> tuple[PatchRule, ...]:
    """Return ``rules`` and those for the masked language model's head and loss, as RoBERTa's.

    Args:
        family: the modeling file.
        prefix: what the classes' names begin with there, as ``"Roberta"``.
        module_name: name of the module that will hold the patched classes (``by_name``).
    """
    head = getattr(family, f"{prefix}LMHead")
    return (
        *rules(family, prefix, module_name),
        PatchRule(
            head,
            subclass(head, _LMHead, module_name),
            ("linear_act",),
            "O2",
            probe_dense_act,
            _head_obstacle,
            absorbs=("dense",),
        ),
        head_rule(getattr(family, f"{prefix}ForMaskedLM"), module_name),
    )


def transform_rule(original: type[nn.Module], module_name: str, activation: str) -> PatchRule:
    """Return the rule for the layer before a vocabulary projection: dense, activation, norm.

    Args:
        original: the class.
        module_name: name of the module that will hold the patched class under the same name.
        activation: name of the child that is the activation.
    """
    return _dense_act_rule(original, _DenseActNorm, module_name, activation)


def _dense_act_rule(
    original: type[nn.Module], forward: type[nn.Module], module_name: str, activation: str
) -> PatchRule:
    return PatchRule(
        original,
        subclass(original, forward, module_name, activation_child=activation),
        ("linear_act",),
        "O2",
        probe_dense_act,
        lambda module: dense_act_obstacle(module, "dense", activation),
        absorbs=("dense", activation),
    )


def _output_obstacle(module: Any) -> str | None:
    return (
        norm_obstacle("LayerNorm", module.LayerNorm)
        or dropout_obstacle("dropout", module.dropout)
        or global_hooks()
    )


def _head_obstacle(module: Any) -> str | None:
    return linear_obstacle("dense", module.dense) or global_hooks()
