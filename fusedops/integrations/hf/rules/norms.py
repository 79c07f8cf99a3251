"""Norms that are known by their code: alone, and with the residual sum before them.

A class may compute one norm or another, as its attributes say (``symbolic.py``): each call asks
which. The forward of a family's layer joins one that is always the same with the sum before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.rules.recognition import NormExpression
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    bypass_obstacle,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.symbolic import Path, at
from fusedops.ops.add_rms_norm import add_rms_norm
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.rms_norm import rms_norm

_HALF = (torch.float16, torch.bfloat16)
_Norms = list[tuple[Path, NormExpression]]

# Every class that has a rule and every patched one: those that ``add_norm`` may bypass.
_JOINED: ClassTable[NormExpression] = ClassTable("norm")


class _Norm(nn.Module):
    """The forward of every norm that is known by its code."""

    norms: _Norms

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        norm = _norm_of(self, self.norms)
        if norm is None or not runs_here(hidden_states) or hidden_states.dim() == 0:
            return super().forward(hidden_states)
        given = _arguments(self, norm, hidden_states.shape, hidden_states.dtype)
        if given is None:
            return super().forward(hidden_states)
        if norm.op == "layer_norm":
            normed = layer_norm(hidden_states, given.shape, given.weight, given.bias, given.eps)
        else:
            normed = rms_norm(hidden_states, given.shape, given.weight, **_options(norm, given))
        return _as_model(normed, norm, hidden_states.dtype)


def add_norm(
    branch: torch.Tensor, residual: torch.Tensor, norm: Any, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``norm(residual + dropout(branch))`` and the sum, in one pass where that is the same.

    ``norm_obstacle`` of the norm must be ``None``; ``dropout_p`` is 0 in evaluation.
    """
    known = _JOINED[type(norm)]
    dtype = torch.promote_types(branch.dtype, residual.dtype)
    given = _arguments(norm, known, residual.shape, dtype)
    if given is None:
        summed = residual + nn.functional.dropout(branch, dropout_p)
        return norm(summed), summed
    options = _options(known, given)
    normed, summed = add_rms_norm(
        branch, residual, given.shape, given.weight, dropout_p=dropout_p, **options
    )
    return _as_model(normed, known, dtype), summed.to(dtype)


def norm_obstacle(name: str, norm: Any) -> str | None:
    """Return why ``add_norm`` must not do the work of ``norm``, or ``None``."""
    return bypass_obstacle(name, norm, _JOINED)


class _Arguments(NamedTuple):
    """The arguments of the op, but for the input."""

    shape: tuple[int, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: Any


def _norm_of(module: Any, norms: _Norms) -> NormExpression | None:
    """Return the norm that a module is in its current state, or ``None``."""
    for path, norm in norms:
        if path.holds(module):
            return norm
    return None


def _arguments(
    module: Any, norm: NormExpression, size: torch.Size, dtype: torch.dtype
) -> _Arguments | None:
    """Return the arguments for an input of this size and dtype, ``None`` if no op serves it."""
    weight, bias, eps = at(module, norm.weight), at(module, norm.bias), at(module, norm.eps)
    shape: Any = size[-1:]
    if norm.shape is not None:
        given = at(module, norm.shape)
        shape = (given,) if isinstance(given, int) else tuple(given)
    dtypes = (dtype, torch.float32) if dtype in _HALF else (dtype,)
    fits = (
        size[-len(shape) :] == shape
        and _is_parameter(weight, shape, dtypes)
        and _is_parameter(bias, shape, dtypes)
        and (weight is None or bias is None or weight.dtype == bias.dtype)
        and (eps is None or isinstance(eps, float))
        # Written in float32, it is computed in float32 for float64 too.
        and not (norm.wide and dtype == torch.float64)
        # What is not written in float32 has the dtype of its weight.
        and ((norm.wide and not norm.one_dtype) or weight is None or weight.dtype == dtype)
    )
    return _Arguments(shape, weight, bias, eps) if fits else None


def _is_parameter(value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    return value is None or (
        isinstance(value, torch.Tensor) and value.shape == shape and value.dtype in dtypes
    )


def _options(norm: NormExpression, given: _Arguments) -> dict[str, Any]:
    """Return the arguments of ``rms_norm`` behind the weight."""
    options = {"eps": given.eps, "rounding": norm.rounding}
    return options if given.weight is None else options | {"weight_offset": norm.weight_offset}


def _as_model(normed: torch.Tensor, norm: NormExpression, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm in the model's dtype: CUDA's autocast makes some of these float32."""
    return normed.to(dtype) if norm.narrowed or norm.rounding == "torch" else normed


def _may_join(path: Path, norm: NormExpression) -> bool:
    """Return whether ``add_norm`` computes a norm as its class does."""
    # Rounded before it is scaled, it has the wider dtype of row and weight.
    rounded_twice = norm.rounding == "hf" and norm.narrowed
    one_row = norm.op == "rms_norm" and norm.weight is not None and norm.shape is None
    wide = norm.wide and not norm.one_dtype
    return not path.answers and one_row and wide and not rounded_twice


def norm_rule(original: type[nn.Module], module_name: str, norms: _Norms) -> PatchRule:
    """Return the rule for a class that computes norms.

    Args:
        original: the class.
        module_name: holds the patched class.
        norms: what it computes, and on which way through its forward.
    """
    patched = subclass(original, _Norm, module_name, norms=norms)
    plan = FusionPlan((norms[0][1].op,), note="known by its code")

    def plan_of(module: Any) -> FusionPlan | Refusal:
        if _norm_of(module, norms) is None:
            return Refusal("it is configured to compute something else")
        return plan

    rule = PatchRule(original, patched, "O1", plan_of)
    if len(norms) == 1 and _may_join(*norms[0]):
        _JOINED[original] = _JOINED[patched] = norms[0][1]
    return rule
