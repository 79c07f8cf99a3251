"""Rules for classes that no table knows, from what the code of their forward computes.

Norms, feed-forward layers and chains of children are recognised under any name, in any library
(``symbolic.py`` runs the code, ``recognition.py`` names it).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf import symbolic
from fusedops.integrations.hf.class_table import own_attribute
from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules import recognition
from fusedops.integrations.hf.rules.chain import chain_rule
from fusedops.integrations.hf.rules.gated_mlp import GatedNames, PackedNames, gated_mlp_rule
from fusedops.integrations.hf.rules.recognition import NormExpression
from fusedops.integrations.hf.rules.rms_norms import NormKind, rms_norm_rule
from fusedops.integrations.hf.rules.rule import FusionPlan, PatchRule, Refusal, runs_here, subclass
from fusedops.integrations.hf.rules.torch_modules import LINEARS
from fusedops.integrations.hf.symbolic import Path, value_of
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.rms_norm import rms_norm

_HALF = (torch.float16, torch.bfloat16)
_Norms = list[tuple[Path, NormExpression]]


def rule_by_code(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for what the forward of a class computes, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
    """
    paths = symbolic.paths_of(original)
    norms = [(path, norm) for path in paths if (norm := recognition.norm_of(path.result))]
    if norms and not symbolic.has_optional_arguments(original):
        return _norm_rule(original, module_name, norms)
    if issubclass(original, nn.Linear):
        _remember_linear(original, paths)
        return None
    return _feed_forward_rule(original, module_name, paths) or _chunk_rule(original, module_name)


def _remember_linear(original: type[nn.Linear], paths: tuple[Path, ...]) -> None:
    """Let the rules do the work of a class that is a linear layer by its code."""
    adds_no_bias = recognition.is_linear(paths)
    if adds_no_bias is not None:
        remember(original)
        LINEARS[original] = adds_no_bias


def _feed_forward_rule(
    original: type[nn.Module], module_name: str, paths: tuple[Path, ...]
) -> PatchRule | None:
    """Return the rule for a class that computes one feed-forward layer on some paths, or ``None``.

    The other paths are the original's.
    """
    known = [(path, layer) for path in paths if (layer := _feed_forward_of(path)) is not None]
    layers = {layer for _, layer in known}
    if len(layers) != 1:
        return None
    layer = layers.pop()
    condition = _any_holds([path for path, _ in known]) if known[0][0].answers else None
    if isinstance(layer, GatedNames | PackedNames):
        return gated_mlp_rule(original, module_name, layer, condition)
    steps, residual = layer
    return chain_rule(original, module_name, steps, residual, condition=condition)


def _feed_forward_of(path: Path) -> Any:
    """Return the gated layer or the chain, with its residual, that a path is, or ``None``."""
    chain = recognition.chain_of(path.result)
    return recognition.gated_of(path.result) or (chain if chain[0] else None)


def _any_holds(paths: list[Path]) -> Callable[[Any], bool]:
    return lambda module: any(path.holds(module) for path in paths)


def _chunk_rule(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for a class that hands on a method of its own which is a chain, or ``None``.

    ``apply_chunking_to_forward`` of transformers calls such a method for a part of the rows.
    """
    code = getattr(original.forward, "__code__", None)
    for name in () if code is None else code.co_names:
        method = own_attribute(original, name)
        if not isinstance(method, FunctionType) or method.__code__.co_argcount != 2:
            continue
        paths = symbolic.paths_of(original, name)
        if len(paths) != 1 or paths[0].answers:
            continue
        steps, residual = recognition.chain_of(paths[0].result)
        if steps and residual is None:
            return chain_rule(original, module_name, steps, method=name)
    return None


class _Norm(nn.Module):
    """The forward of every norm that is known by its code."""

    norms: _Norms

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


def _norm_of(module: Any, norms: _Norms) -> NormExpression | None:
    """Return the norm that a module is in its current state, or ``None``."""
    return next((norm for path, norm in norms if path.holds(module)), None)


def _arguments(module: Any, input: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the norm and its arguments for an input that the op serves, or ``None``."""
    norm = _norm_of(module, module.norms)
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
        isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dtype in dtypes
    )


def _kind_of(norms: _Norms) -> NormKind | None:
    """Return the kind of a class that is always one root-mean-square norm with a weight."""
    (path, norm), *others = norms
    match norm.eps:
        case ("attribute", str(eps_name)):
            pass
        case _:
            return None
    plain = norm.op == "rms_norm" and norm.weight == ("attribute", "weight") and norm.shape is None
    # Rounded before it is scaled, it has the wider dtype of row and weight.
    rounded_twice = norm.rounding == "hf" and norm.narrowed
    if others or path.answers or not plain or not norm.wide or rounded_twice or "." in eps_name:
        return None
    return NormKind(eps_name, norm.weight_offset, norm.rounding)


def _norm_rule(original: type[nn.Module], module_name: str, norms: _Norms) -> PatchRule:
    kind = _kind_of(norms)
    if kind is not None:
        return rms_norm_rule(original, module_name, kind)
    plan = FusionPlan((norms[0][1].op,), note="known by its code")

    def plan_of(module: Any) -> FusionPlan | Refusal:
        if _norm_of(module, norms) is None:
            return Refusal("it is configured to compute something else")
        return plan

    return PatchRule(original, subclass(original, _Norm, module_name, norms=norms), "O1", plan_of)
