"""Rules for classes that no table knows, from what the code of their forward computes.

Norms, gated feed-forward layers and chains of children are recognised under any name, in any
library (``symbolic.py`` runs the code, ``recognition.py`` names it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf import symbolic
from fusedops.integrations.hf.rules import recognition
from fusedops.integrations.hf.rules.chain import chain_rule
from fusedops.integrations.hf.rules.gated_mlp import (
    GatedNames,
    gated_mlp_rule,
    packed_gated_mlp_rule,
)
from fusedops.integrations.hf.rules.recognition import NormExpression
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    plain_weight,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.symbolic import Path, value_of
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.rms_norm import rms_norm

_HALF = (torch.float16, torch.bfloat16)


def rule_by_code(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for what the forward of a class computes, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
    """
    paths = symbolic.paths_of(original)
    norms = [(path, norm) for path in paths if (norm := recognition.norm_of(path.result))]
    if norms:
        return _norm_rule(original, module_name, norms)
    for path in paths:
        rule = _feed_forward_rule(original, module_name, path)
        if rule is not None:
            return rule
    return None


def _feed_forward_rule(original: type[nn.Module], module_name: str, path: Path) -> PatchRule | None:
    """Return the rule for the modules of a class that take one way through its forward."""
    gated = recognition.gated_of(path.result)
    steps, residual = recognition.chain_of(path.result)
    if isinstance(gated, GatedNames):
        rule = gated_mlp_rule(original, module_name, gated)
    elif gated is not None:
        rule = packed_gated_mlp_rule(original, module_name, gated)
    elif steps:
        rule = chain_rule(original, module_name, steps, residual)
    else:
        return None
    if not path.answers:
        return rule
    return rule.where(path.holds, "it is configured to compute something else")


class _Norm(nn.Module):
    """The forward of every norm that is known by its code."""

    norms: list[tuple[Path, NormExpression]]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        arguments = _arguments(self, hidden_states)
        if arguments is None:
            return super().forward(hidden_states)
        norm, shape, weight, bias, eps = arguments
        if norm.op == "layer_norm":
            normed = layer_norm(hidden_states, shape, weight, bias, eps)
        else:
            options: dict[str, Any] = {"rounding": norm.rounding}
            if weight is not None:
                options["weight_offset"] = norm.weight_offset
            normed = rms_norm(hidden_states, shape, weight, eps, **options)
        # CUDA's autocast computes some of these in float32; the code returns the input's dtype.
        as_input = norm.narrowed or norm.rounding == "torch"
        return normed.to(hidden_states.dtype) if as_input else normed


def _norm_of(module: Any) -> NormExpression | None:
    """Return the norm that a module is in its current state, or ``None``."""
    return next((norm for path, norm in module.norms if path.holds(module)), None)


def _arguments(module: Any, input: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the norm and its arguments for an input that the op serves, or ``None``."""
    norm = _norm_of(module)
    if norm is None or not runs_here(input) or input.dim() == 0:
        return None
    weight, bias, eps = (_at(module, place) for place in (norm.weight, norm.bias, norm.eps))
    shape = (input.shape[-1],)
    if norm.shape is not None:
        given = value_of(module, norm.shape[1])
        shape = (given,) if isinstance(given, int) else tuple(given)
    dtypes = (input.dtype, torch.float32) if input.dtype in _HALF else (input.dtype,)
    fits = (
        tuple(input.shape[-len(shape) :]) == shape
        and all(_is_parameter(value, shape, dtypes) for value in (weight, bias))
        and (weight is None or bias is None or weight.dtype == bias.dtype)
        and (eps is None or isinstance(eps, float))
        # Written in float32, it is computed in float32 for float64 too.
        and not (norm.wide and input.dtype == torch.float64)
        # What is not written in float32 has the dtype of its weight.
        and (norm.wide or weight is None or weight.dtype == input.dtype)
    )
    return (norm, shape, weight, bias, eps) if fits else None


def _at(module: Any, place: Any) -> Any:
    return value_of(module, place[1]) if isinstance(place, tuple) else place


def _is_parameter(value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    return value is None or (
        isinstance(value, torch.Tensor)
        and plain_weight(value)
        and tuple(value.shape) == shape
        and value.dtype in dtypes
    )


def _norm_rule(
    original: type[nn.Module], module_name: str, norms: list[tuple[Path, NormExpression]]
) -> PatchRule:
    def obstacle(module: Any) -> str | None:
        computes = any(path.holds(module) for path, _ in norms)
        return None if computes else "it is configured to compute something else"

    op = norms[0][1].op
    return PatchRule(
        original,
        subclass(original, _Norm, module_name, norms=norms),
        (op,),
        "O1",
        obstacle=obstacle,
        note=lambda module: "known by its code",
    )
