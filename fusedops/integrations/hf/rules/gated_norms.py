"""RMS norms with a gate, which stand behind the recurrent mixers of hybrid models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.integrations.hf.original_code import WatchList, is_plain, replaced
from fusedops.integrations.hf.rules.activations import watched_activation
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    runs_here,
    subclass,
)
from fusedops.ops.gated_rms_norm import GATE_ACTIVATIONS
from fusedops.ops.rms_norm import rms_norm

_HALF = (torch.float16, torch.bfloat16)


class GatedNorm(NamedTuple):
    """What the code of a class computes, besides the formula that all share."""

    norm_before_gate: bool | None = None  # None: the attribute of this name says it
    groups: str | None = None  # the attribute with their number, or ``group_size`` with their size
    promotes: bool = False  # whether the result has the dtype of a row times the weight
    # Whether another shape than that of several tokens of sequences is changed (FalconH1's)
    reshapes: bool = False


class _GatedNorm(nn.Module):
    formula: GatedNorm
    activations: dict[str, WatchList]  # name of the gate's -> what it reads

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
        module: Any = self
        if gate is None or not _fits(module, self.formula, hidden_states, gate):
            return super().forward(hidden_states, gate)
        before = self.formula.norm_before_gate
        normed = rms_norm(
            hidden_states,
            hidden_states.shape[-1:],
            module.weight,
            module.variance_epsilon,
            gate=gate,
            norm_before_gate=module.norm_before_gate if before is None else before,
            groups=_groups(module, self.formula, hidden_states.shape[-1]),
            gate_activation=_activation(module),
        )
        if self.formula.promotes:
            return normed.to(torch.promote_types(normed.dtype, module.weight.dtype))
        return normed


def _fits(module: Any, formula: GatedNorm, input: torch.Tensor, gate: torch.Tensor) -> bool:
    weight, dtype = module.weight, input.dtype
    parts = 1 if formula.groups is None else getattr(module, formula.groups)
    return (
        runs_here(input)
        and is_plain(gate)
        and _obstacle(module, module.activations) is None
        and dtype != torch.float64  # which the code computes in float32
        and gate.dtype == dtype
        and gate.shape == input.shape
        and weight.shape == input.shape[-1:]
        and input.shape[-1] % parts == 0
        and (weight.dtype == dtype or (dtype in _HALF and weight.dtype == torch.float32))
        and not (formula.reshapes and (input.dim() != 3 or input.shape[1] == 1))
    )


def _groups(module: Any, formula: GatedNorm, columns: int) -> int:
    if formula.groups is None:
        return 1
    value = int(getattr(module, formula.groups))
    return columns // value if formula.groups == "group_size" else value


def _activation(module: Any) -> Any:
    return getattr(module, "activation", "silu")


def _obstacle(module: Any, watched: dict[str, WatchList]) -> str | None:
    """Return why the gate's activation is none of the op's, or ``None``."""
    activation = _activation(module)
    known = activation in watched
    return replaced(watched[activation]) if known else f"its activation is {activation!r}"


def gated_norm_rule(original: type[nn.Module], formula: GatedNorm) -> PatchRule:
    """Return the rule for a class of gated norms with known code."""
    namespace: Any = original.forward.__globals__
    watched = {name: watched_activation(namespace, name) for name in GATE_ACTIVATIONS}
    patched = subclass(original, _GatedNorm, formula=formula, activations=watched)

    def plan(module: Any) -> FusionPlan | Refusal:
        reason = _obstacle(module, watched)
        return FusionPlan(("gated_rms_norm",)) if reason is None else Refusal(reason)

    return PatchRule(original, patched, "O1", plan)
