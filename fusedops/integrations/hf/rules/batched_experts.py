"""Experts that get equal numbers of rows and compute them by ``bmm``, known by their code.

Llama 4 hands each expert all tokens, multiplied by their scores, so that no rows are sorted: the
plan is the same for each call, and ``moe_mlp`` computes both products and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules.activations import known_name_in, name_in, obstacle_in
from fusedops.integrations.hf.rules.recognition import BatchedExperts
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    subclass,
)
from fusedops.integrations.hf.symbolic import value_of
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.moe_mlp import moe_mlp


class _BatchedExperts(nn.Module):
    """The forward of all patched classes of this kind."""

    experts: BatchedExperts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        w1, w2 = _weights(self, self.experts)
        rows = hidden_states.reshape(-1, w1.shape[1])
        if rows.shape[0] % w1.shape[0] != 0:
            output: torch.Tensor = super().forward(hidden_states)  # an error of theirs
            return output
        activation = known_name_in(self, self.experts.activation)
        plan = _equal_plan(rows, w1.shape[0])
        return moe_mlp(rows, plan, w1, w2, activation=activation, recompute=False)


def _weights(module: Any, experts: BatchedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = (value_of(module, path) for _, path in (experts.gate_up, experts.down))
    return gate_up, down


def _equal_plan(rows: torch.Tensor, num_experts: int) -> RoutingPlan:
    """Return the plan of rows that are sorted by expert, of which each has as many."""
    count, device = rows.shape[0], rows.device
    per_expert = count // num_experts
    order = torch.arange(count, dtype=torch.int32, device=device)
    ends = torch.arange(1, num_experts + 1, dtype=torch.int32, device=device) * per_expert
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return RoutingPlan(
        expert_ids=(order // max(1, per_expert)).unsqueeze(1),
        probs=torch.ones(count, 1, dtype=wide, device=device),
        permutation=order,
        positions=order.unsqueeze(1),
        tokens_per_expert=torch.full_like(ends, per_expert),
        offsets=ends,
        kept=None,
        num_experts=num_experts,
    )


def _plan(module: Any, experts: BatchedExperts) -> FusionPlan | Refusal:
    activation = experts.activation
    if name_in(module, activation) is None:
        return NOT_APPLICABLE
    reason = obstacle_in(module, activation) or global_hooks()
    if reason is None and any(weight.dim() != 3 for weight in _weights(module, experts)):
        reason = "its weights are no three-dimensional tensors"
    if reason is not None:
        return Refusal(reason)
    absorbs = (activation,) if isinstance(activation, str) else ()
    return FusionPlan(("moe_mlp",), absorbs, "known by its code")


def batched_experts_rule(
    original: type[nn.Module], module_name: str, experts: BatchedExperts
) -> PatchRule:
    """Return the rule for experts whose forward is two calls of ``bmm`` with a gate between."""
    return PatchRule(
        original,
        subclass(original, _BatchedExperts, module_name, experts=experts),
        "O2",
        lambda module: _plan(module, experts),
        guarded=True,
    )
