"""Root-mean-square norms of transformers' families: alone, and with the residual sum before them.

They are known by their code (``by_code.py``), in three kinds: Llama's rounds the normalised row
before it scales, Gemma's after, and keeps the weight minus one, GPT-OSS's after as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    bypass_obstacle,
    runs_here,
    subclass,
)
from fusedops.ops.add_rms_norm import add_rms_norm
from fusedops.ops.rms_norm import rms_norm


@dataclass(frozen=True)
class NormKind:
    """What a class of norm computes."""

    eps_name: str  # the attribute that is added to the mean square
    weight_offset: float  # as in ``rms_norm``
    rounding: str  # as in ``rms_norm``

    def options(self, norm: Any) -> dict[str, Any]:
        """Return the arguments of ``rms_norm`` other than the weight."""
        return {
            "eps": getattr(norm, self.eps_name),
            "weight_offset": self.weight_offset,
            "rounding": self.rounding,
        }


# Every class that has a rule and every patched one: those that ``add_norm`` may bypass.
_KINDS: ClassTable[NormKind] = ClassTable("norm")


class _RMSNorm(nn.Module):
    """The forward of every patched root-mean-square norm."""

    kind: NormKind
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if (
            not runs_here(hidden_states)
            or not _fits(weight, hidden_states.dtype)
            or weight.shape != hidden_states.shape[-1:]
        ):
            return super().forward(hidden_states)
        options = self.kind.options(self)
        normed = rms_norm(hidden_states, self.weight.shape, self.weight, **options)
        return _as_model(normed, self.kind, hidden_states.dtype)


def add_norm(
    branch: torch.Tensor, residual: torch.Tensor, norm: Any, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``norm(residual + dropout(branch))`` and the sum, in one pass where that is the same.

    ``norm_obstacle`` of the norm must be ``None``; ``dropout_p`` is 0 in evaluation.
    """
    dtype = torch.promote_types(branch.dtype, residual.dtype)
    if not _fits(norm.weight, dtype):
        summed = residual + nn.functional.dropout(branch, dropout_p)
        return norm(summed), summed
    kind = _KINDS[type(norm)]
    shape, options = norm.weight.shape, kind.options(norm)
    normed, summed = add_rms_norm(
        branch, residual, shape, norm.weight, dropout_p=dropout_p, **options
    )
    return _as_model(normed, kind, dtype), summed.to(dtype)


def norm_obstacle(name: str, norm: Any) -> str | None:
    """Return why ``add_norm`` must not do the work of ``norm``, or ``None``."""
    return bypass_obstacle(name, norm, _KINDS)


def _fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the op computes for these dtypes what the models do.

    They normalise in float32 whatever the input is, the op float64 in float64.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return weight.dtype in (dtype, torch.float32)
    return dtype == weight.dtype == torch.float32


def _as_model(normed: torch.Tensor, kind: NormKind, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm in the model's dtype: CUDA's autocast makes torch's kind float32."""
    return normed.to(dtype) if kind.rounding == "torch" else normed


def rms_norm_rule(original: type[nn.Module], module_name: str, kind: NormKind) -> PatchRule:
    """Return the rule for a family's root-mean-square norm, which computes ``kind``."""
    patched = subclass(original, _RMSNorm, module_name, kind=kind)
    plan = FusionPlan(("rms_norm",), note="known by its code")
    rule = PatchRule(original, patched, "O1", lambda norm: plan)
    _KINDS[original] = _KINDS[patched] = kind
    return rule
