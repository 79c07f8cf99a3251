"""Rules for the families that are Llama under other names, with a few differences.

A decoder layer is norm, attention, residual sum, norm, gated feed-forward layer, residual sum; a
family's file names its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules import rms_norms
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.gated_mlp import gated_mlp_rule
from fusedops.integrations.hf.rules.residual_norm import unknown_forward, unknown_names
from fusedops.integrations.hf.rules.rms_norms import (
    add_norm,
    norm_obstacle,
    probe_add_norm,
    rms_norm_rule,
)
from fusedops.integrations.hf.rules.rule import PatchRule, global_hooks, runs_here, subclass


class _Layer(nn.Module):
    """A decoder layer's work, whatever the order of its arguments."""

    def _steps_aside(self, hidden_states: torch.Tensor) -> bool:
        return not runs_here(hidden_states) or _layer_obstacle(self) is not None

    def _residuals(self, hidden_states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        module: Any = self
        normed = module.input_layernorm(hidden_states)
        attended, _ = module.self_attn(hidden_states=normed, **options)
        normed, residual = add_norm(attended, hidden_states, module.post_attention_layernorm)
        output = module.mlp(normed)
        # A layer of experts may give its router's scores beside.
        return residual + (output[0] if isinstance(output, tuple) else output)


class DecoderLayer(_Layer):
    """Llama's decoder layer with the first residual sum and the norm after it in one pass."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        options = dict(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        if self._steps_aside(hidden_states):
            return super().forward(hidden_states, **options)
        return self._residuals(hidden_states, options)


class PositionsFirst(_Layer):
    """The same layer where the rotary tables are the second argument (Mixtral)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        options = dict(
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        if self._steps_aside(hidden_states):
            return super().forward(hidden_states, **options)
        return self._residuals(hidden_states, options)


def _layer_obstacle(layer: Any) -> str | None:
    name = "post_attention_layernorm"
    return norm_obstacle(name, layer.post_attention_layernorm) or global_hooks()


def layer_rule(
    original: type[nn.Module],
    forward: type[nn.Module],
    module_name: str,
    obstacle: Callable[[Any], str | None] = _layer_obstacle,
    absorbs: tuple[str, ...] = ("post_attention_layernorm",),
) -> PatchRule:
    """Return the rule for a decoder layer, which refuses where this transformers has another.

    Args:
        original: the class.
        forward: a class with the fused forward.
        module_name: name of the module that will hold the patched class under the same name.
        obstacle: as in ``PatchRule``.
        absorbs: as in ``PatchRule``; the norm after the residual sum comes first.
    """
    unknown = unknown_forward(forward, original) or unknown_names(forward, original)
    return PatchRule(
        original,
        subclass(original, forward, module_name),
        ("add_rms_norm",),
        "O1",
        lambda layer: probe_add_norm(getattr(layer, absorbs[0])),
        lambda layer: unknown or obstacle(layer),
        absorbs=absorbs,
    )


def rules(
    family: ModuleType, prefix: str, module_name: str, *, norm: rms_norms.NormKind = rms_norms.LLAMA
) -> tuple[PatchRule, ...]:
    """Return the rules for a family's norm, feed-forward layer, attention and decoder layer.

    Args:
        family: the modeling file.
        prefix: what the classes' names begin with there, as ``"Llama"``.
        module_name: name of the module that will hold the patched classes (``by_name``).
        norm: what its norms compute.
    """
    return (
        *rules_inside(family, prefix, module_name, norm=norm),
        layer_rule(getattr(family, f"{prefix}DecoderLayer"), DecoderLayer, module_name),
    )


def rules_inside(
    family: ModuleType, prefix: str, module_name: str, *, norm: rms_norms.NormKind = rms_norms.LLAMA
) -> tuple[PatchRule, ...]:
    """Return ``rules`` without the one for the decoder layer.

    Args:
        family: the modeling file.
        prefix: what the classes' names begin with there, as ``"Llama"``.
        module_name: name of the module that will hold the patched classes (``by_name``).
        norm: what its norms compute.
    """
    return (
        rms_norm_rule(getattr(family, f"{prefix}RMSNorm"), module_name, norm),
        gated_mlp_rule(getattr(family, f"{prefix}MLP"), module_name),
        attention_rule(getattr(family, f"{prefix}Attention"), module_name, eager=True, rotary=True),
    )
