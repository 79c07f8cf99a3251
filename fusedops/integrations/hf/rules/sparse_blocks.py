"""Sparse layers of transformers' families: router, experts, and what every token visits.

A layer asks its router for a plan and lets the experts compute by it, where the families hand
indices over that would be sorted once more. Where router or experts must be called (somebody
records the logits, expert parallelism has wrapped them) the family's own forward calls them; each
is fused on its own then.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules.experts import OWN_GATE, compute, experts_obstacle, known_gate
from fusedops.integrations.hf.rules.routers import router_obstacle
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.ops._routing_plan import RoutingPlan


class SparseBlock(nn.Module):
    """Router and experts alone, as in Qwen3-MoE and OLMoE."""

    router_name = "gate"

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        """Return the weighted sum of each token's experts, ``[batch, seq_len, hidden_size]``."""
        if not runs_here(hidden_states) or self._obstacle() is not None:
            return super().forward(hidden_states)
        _, plan = getattr(self, self.router_name)._route(_rows(hidden_states))
        output = compute(self.experts, _rows(hidden_states), plan)
        return self._finished(output.view_as(hidden_states), hidden_states, plan)

    def _obstacle(self: Any) -> str | None:
        """Return why the layer must call its children now, or ``None``."""
        router = getattr(self, self.router_name)
        return (
            router_obstacle(self.router_name, router)
            or experts_obstacle("experts", self.experts)
            or global_hooks()
        )

    def _finished(self, output: torch.Tensor, input: torch.Tensor, plan: RoutingPlan) -> Any:
        """Return what the family's layer returns, given the sum over the chosen experts."""
        return output


def _rows(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states.reshape(-1, hidden_states.shape[-1])


class NoisyBlock(SparseBlock):
    """Mixtral's layer, which may scale its input by noise in training."""

    def _obstacle(self: Any) -> str | None:
        if self.training and self.jitter_noise > 0:
            return "its input is scaled by noise"
        return super()._obstacle()


class GatedSharedBlock(SparseBlock):
    """Qwen2-MoE's layer: a gate weighs the expert that every token visits."""

    def _finished(self: Any, output: torch.Tensor, input: torch.Tensor, plan: RoutingPlan) -> Any:
        shared = self.shared_expert(input)
        return output + torch.sigmoid(self.shared_expert_gate(input)) * shared


class SharedBlock(SparseBlock):
    """DeepSeek-V3's layer: every token visits the shared experts too."""

    def _finished(self: Any, output: torch.Tensor, input: torch.Tensor, plan: RoutingPlan) -> Any:
        return output + self.shared_experts(input)


class ScoredBlock(SparseBlock):
    """GPT-OSS's layer, which also returns the weights."""

    router_name = "router"

    def _finished(self, output: torch.Tensor, input: torch.Tensor, plan: RoutingPlan) -> Any:
        return output, plan.probs.to(input.dtype)


def _rule(original: type[nn.Module], module_name: str, *, forward: type[SparseBlock]) -> PatchRule:
    children = (forward.router_name, "experts")
    patched = subclass(original, forward, module_name)
    return PatchRule(original, patched, "O2", lambda module: _plan(module, children))


def _plan(module: Any, children: tuple[str, ...]) -> FusionPlan:
    ops = ("moe_route", "moe_mlp")
    if not isinstance(module, SparseBlock):  # not patched yet, and neither are its children
        return FusionPlan(ops, children)
    reason = module._obstacle()
    if reason is not None:
        return FusionPlan(ops, note=f"router and experts apart: {reason}")
    return FusionPlan(ops, children, None if known_gate(module.experts) is not None else OWN_GATE)


RULES = {
    "MixtralSparseMoeBlock": partial(_rule, forward=NoisyBlock),
    "Qwen2MoeSparseMoeBlock": partial(_rule, forward=GatedSharedBlock),
    "Qwen3MoeSparseMoeBlock": partial(_rule, forward=SparseBlock),
    "OlmoeSparseMoeBlock": partial(_rule, forward=SparseBlock),
    "DeepseekV3MoE": partial(_rule, forward=SharedBlock),
    "GptOssMLP": partial(_rule, forward=ScoredBlock),
}
