"""Layers of transformers in which a residual sum and the norm after it are one op.

A family gives the forward of its layer as a function of the layer, of the hidden states and of all
other arguments by the names that the original has for them in the installed release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    bypass_obstacle,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.rules.torch_modules import LayerNorm
from fusedops.ops.add_layer_norm import add_layer_norm

_NORMS = (nn.LayerNorm, LayerNorm)
remember(nn.Dropout)

# Arguments that a release renamed: it still takes the former name, which its decorator replaces.
_RENAMED = (("past_key_values", "cache"),)  # 5.24
Names = tuple[str, ...]


def add_norm(
    branch: torch.Tensor, residual: torch.Tensor, norm: Any, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``norm(residual + dropout(branch))`` and the sum, for a norm that may be bypassed."""
    shape, weight, bias = norm.normalized_shape, norm.weight, norm.bias
    return add_layer_norm(branch, residual, shape, weight, bias, norm.eps, dropout_p=dropout_p)


def probability(dropout: Any) -> float:
    """Return the probability with which an ``nn.Dropout`` drops now."""
    return dropout.p if dropout.training else 0.0


def layer_rule(
    original: type[nn.Module],
    *,
    compute: Callable[..., Any],
    norms: Names | Callable[[Any], Names] = (),
    dropouts: Names = (),
    ops: Names = (),
    feed_forward: tuple[chain.Step, ...] = (),
    base: type[nn.Module] | None = None,
) -> PatchRule:
    """Return the rule for a layer whose forward does the work of some norms and dropouts.

    It refuses where one of them must be called.

    Args:
        original: the class.
        compute: the fused forward, see the top of this file.
        norms: names of the norms behind a sum, each for ``add_norm``; or what they are in a layer.
        dropouts: names of the dropouts that the forward does not call.
        ops: what it calls but for norms and feed-forward layer.
        feed_forward: the steps of the feed-forward layer, if they are children of the layer.
        base: has further methods of the patched class.
    """

    def names_of(layer: Any) -> Names:
        names = norms(layer) if callable(norms) else norms
        # Some layers of a class have no cross-attention, and not its norm.
        return tuple(name for name in names if hasattr(layer, name))

    def obstacle(layer: Any) -> str | None:
        reason = global_hooks()
        for name in names_of(layer):
            reason = reason or bypass_obstacle(name, getattr(layer, name), _NORMS)
        for name in dropouts:
            reason = reason or bypass_obstacle(name, getattr(layer, name), (nn.Dropout,))
        return reason

    def plan(layer: Any) -> FusionPlan | Refusal:
        reason = obstacle(layer)
        if reason is not None:
            return Refusal(reason)
        names = names_of(layer)
        fused = (("add_layer_norm",) if names else ()) + ops
        products = chain.chain_plan(layer, feed_forward) if feed_forward else FusionPlan(())
        if isinstance(products, Refusal):
            products = FusionPlan((), note=f"without mlp: {products.reason}")
        children = names + dropouts + products.absorbs
        return FusionPlan((*products.ops, *fused), children, products.note)

    arguments = list(inspect.signature(original.forward).parameters.values())[1:]
    defaults = {a.name: a.default for a in arguments if a.default is not inspect.Parameter.empty}
    by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = tuple(a.name for a in arguments if a.kind is by_place)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = defaults | dict(zip(places, args, strict=False)) | kwargs
        hidden_states = options.pop(places[0], None)
        if (
            not runs_here(hidden_states)
            or any(former in kwargs and name in places for former, name in _RENAMED)
            or obstacle(self) is not None
        ):
            return original.forward(self, *args, **kwargs)
        return compute(self, hidden_states, **options)

    tiles = {"tile_tokens": None} if feed_forward else {}
    patched = subclass(original, base, forward=forward, **tiles)
    return PatchRule(original, patched, "O2" if feed_forward else "O1", plan)
