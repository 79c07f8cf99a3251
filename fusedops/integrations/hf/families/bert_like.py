"""Rules for the modules that BERT's descendants copy: attention, its end, the feed-forward layer.

The copies differ in name only (``RobertaSelfOutput`` is ``BertSelfOutput``); a family's file names
its modeling file, and the prefix of the class names there (``"Roberta"``).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules import feed_forward, residual_norm
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.rule import PatchRule, copyable, global_hooks, subclass
from fusedops.integrations.hf.rules.torch_modules import linear_obstacle
from fusedops.ops.linear_act import linear_act


class _Output(nn.Module):
    """``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``, all after the product in one."""

    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        dropout_p = residual_norm.probability(self.dropout)
        branch = self.dense(hidden_states)
        return residual_norm.add_norm(branch, input_tensor, self.LayerNorm, dropout_p)[0]


class _DenseAct(nn.Module):
    """``activation(dense(hidden_states))`` as one op, and a norm after it where there is one."""

    activation_child: str
    with_norm: bool

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        activation = getattr(self, self.activation_child)
        output = feed_forward.dense_act(self.dense, activation, hidden_states)
        return self.LayerNorm(output) if self.with_norm else output


class _LMHead(nn.Module):
    """``decoder(layer_norm(gelu(dense(features))))``; its GELU is a function."""

    def forward(self: Any, features: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        dense = self.dense
        hidden_states = linear_act(features, dense.weight, dense.bias, activation="gelu")
        return self.decoder(self.layer_norm(hidden_states))


def rules(family: ModuleType, prefix: str, module_name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's copies of BERT's modules."""
    attentions = [getattr(family, f"{prefix}{name}Attention") for name in ("Self", "Cross")]
    outputs = [getattr(family, f"{prefix}{name}") for name in ("SelfOutput", "Output")]
    intermediate = getattr(family, f"{prefix}Intermediate")
    return (
        *(attention_rule(original, module_name, ("dropout",)) for original in attentions),
        *(
            residual_norm.layer_rule(
                original,
                module_name,
                _Output,
                ("add_layer_norm",),
                norms=("LayerNorm",),
                dropouts=("dropout",),
            )
            for original in outputs
        ),
        dense_act_rule(intermediate, module_name, "intermediate_act_fn", with_norm=False),
    )


def roberta_rules(family: ModuleType, prefix: str, module_name: str) -> tuple[PatchRule, ...]:
    """Return ``rules`` and that for the masked language model's head, as RoBERTa's."""
    head = getattr(family, f"{prefix}LMHead")
    return (
        *rules(family, prefix, module_name),
        PatchRule(
            head,
            subclass(head, _LMHead, module_name),
            ("linear_act",),
            "O2",
            obstacle=lambda module: linear_obstacle("dense", module.dense) or global_hooks(),
            absorbs=("dense",),
            guarded=True,
        ),
    )


@copyable
def dense_act_rule(
    original: type[nn.Module], module_name: str, activation: str, *, with_norm: bool = True
) -> PatchRule:
    """Return the rule for a layer of ``dense``, the child ``activation``, and maybe a norm."""
    return PatchRule(
        original,
        subclass(
            original, _DenseAct, module_name, activation_child=activation, with_norm=with_norm
        ),
        ("linear_act",),
        "O2",
        obstacle=lambda module: feed_forward.dense_act_obstacle(module, "dense", activation),
        absorbs=("dense", activation),
        guarded=True,
    )
