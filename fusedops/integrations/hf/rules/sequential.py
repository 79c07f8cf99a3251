"""The rule for ``nn.Sequential``: its children are the steps of a chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    runs_here,
)


class Sequential(nn.Sequential):
    """``nn.Sequential`` that runs linear, activation (and linear) as one op where they follow."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the last module's output."""
        known = isinstance(input, torch.Tensor) and runs_here(input)
        if not known or global_hooks() is not None:
            output: torch.Tensor = super().forward(input)
            return output
        return chain.run(self, tuple(self._modules), input)


def _plan(module: Any) -> FusionPlan | Refusal:
    steps = tuple(module._modules)
    return chain.chain_plan(module, steps) if chain.has_pair(module, steps) else NOT_APPLICABLE


RULES = (PatchRule(nn.Sequential, Sequential, "O2", _plan),)
