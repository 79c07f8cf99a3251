"""Norms that are known by their code; each call asks which one a class with several computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules.recognition import NormExpression
from fusedops.integrations.hf.rules.rule import FusionPlan, PatchRule, Refusal, runs_here, subclass
from fusedops.integrations.hf.symbolic import Path, at
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.rms_norm import rms_norm

_HALF = (torch.float16, torch.bfloat16)
_Norms = list[tuple[Path, NormExpression]]


class _Norm(nn.Module):
    norms: _Norms

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        norm = _norm_of(self, self.norms)
        if norm is None or not runs_here(hidden_states) or hidden_states.dim() == 0:
            return super().forward(hidden_states)
        weight, bias, eps = at(self, norm.weight), at(self, norm.bias), at(self, norm.eps)
        shape: Any = hidden_states.shape[-1:]
        if norm.shape is not None:
            given = at(self, norm.shape)
            shape = (given,) if isinstance(given, int) else tuple(given)
        if not _fits(norm, hidden_states, shape, weight, bias, eps):
            return super().forward(hidden_states)
        if norm.op == "layer_norm":
            normed = layer_norm(hidden_states, shape, weight, bias, eps)
        else:
            options: dict[str, Any] = {"rounding": norm.rounding}
            options |= {} if weight is None else {"weight_offset": norm.weight_offset}
            normed = rms_norm(hidden_states, shape, weight, eps, **options)
        # CUDA's autocast computes some of these in float32; the code returns the input's dtype.
        as_input = norm.narrowed or norm.rounding == "torch"
        return normed.to(hidden_states.dtype) if as_input else normed


def _norm_of(module: Any, norms: _Norms) -> NormExpression | None:
    return next((norm for path, norm in norms if path.holds(module)), None)


def _fits(
    norm: NormExpression, input: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: Any
) -> bool:
    dtype = input.dtype
    dtypes = (dtype, torch.float32) if dtype in _HALF else (dtype,)
    return (
        input.shape[-len(shape) :] == shape
        and _is_parameter(weight, shape, dtypes)
        and _is_parameter(bias, shape, dtypes)
        and (weight is None or bias is None or weight.dtype == bias.dtype)
        and (eps is None or isinstance(eps, float))
        # Written in float32, it is computed in float32 for float64 too.
        and not (norm.wide and dtype == torch.float64)
        # What is not written in float32 has the dtype of its weight.
        and ((norm.wide and not norm.one_dtype) or weight is None or weight.dtype == dtype)
    )


def _is_parameter(value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    return value is None or (
        isinstance(value, torch.Tensor) and value.shape == shape and value.dtype in dtypes
    )


def norm_rule(original: type[nn.Module], norms: _Norms) -> PatchRule:
    """Return the rule for a class that computes norms, each on a path through its forward."""
    patched = subclass(original, _Norm, norms=norms)
    plan = FusionPlan((norms[0][1].op,), note="known by its code")

    def plan_of(module: Any) -> FusionPlan | Refusal:
        if _norm_of(module, norms) is None:
            return Refusal("it is configured to compute something else")
        return plan

    return PatchRule(original, patched, "O1", plan_of)
