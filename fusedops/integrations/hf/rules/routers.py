"""Routers of transformers' families: scores, choice and normalisation as one op.

The logits are computed as the families do, so that the same experts are chosen. What is returned
stays what the families' layers take: logits, weights and indices (int64).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    bypass_obstacle,
    subclass,
)
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.moe_route import moe_route

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Router(nn.Module):
    """The forward of every patched router, around the family's own ``_route``."""

    fused_rule: PatchRule
    rounds_weights = True  # to the dtype of the logits; the op computes them in float32

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        """Return logits ``[tokens, num_experts]``, weights and indices ``[tokens, k]``."""
        logits, plan = self._route(hidden_states)
        weights = plan.probs.to(logits.dtype) if self.rounds_weights else plan.probs
        return logits, weights, plan.expert_ids.long()

    def _route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingPlan]:
        raise NotImplementedError

    def _obstacle(self) -> str | None:
        """Return why this router's settings are not computed as the family does, or ``None``."""
        return None


class SoftmaxRouter(Router):
    """The router of Qwen and OLMoE: the weights add up to 1 if ``norm_topk_prob``."""

    def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingPlan]:
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        return logits, moe_route(logits, self.top_k, normalize=bool(self.norm_topk_prob))


class Float32Router(SoftmaxRouter):
    """Mixtral's router: the weights of the chosen add up to 1, and stay float32."""

    norm_topk_prob = True
    rounds_weights = False


class GroupedSigmoid(Router):
    """DeepSeek-V3's router: float32 sigmoids, the best groups by two each, a balancing bias.

    A token that takes more experts than its best groups have gets others, whose scores stand at
    minus infinity there: which of them is up to ``torch.topk``.
    """

    rounds_weights = False

    def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingPlan]:
        rows = hidden_states.reshape(-1, self.hidden_dim).float()
        logits = F.linear(rows, self.weight.float()).view(-1, self.num_experts)
        plan = moe_route(
            logits,
            self.top_k,
            score="sigmoid",
            normalize=bool(self.norm_topk_prob),
            bias=self.e_score_correction_bias,
            num_groups=self.num_group,
            topk_groups=self.topk_group,
            group_score="top2_sum",
            scaling=float(self.routed_scaling_factor),
        )
        return logits, plan

    def _obstacle(self: Any) -> str | None:
        within = int(self.num_experts // self.num_group * self.topk_group)
        if self.top_k <= within:
            return None
        return (
            f"a token takes {self.top_k} experts, its best groups have {within}, and which of "
            "the others it gets is not defined"
        )


class SoftmaxOfChosen(Router):
    """GPT-OSS's router: softmax over the logits of the chosen."""

    def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingPlan]:
        logits = F.linear(hidden_states, self.weight, self.bias)
        return logits, moe_route(logits, self.top_k, softmax_after=True)


def router_obstacle(name: str, router: Any) -> str | None:
    """Return why a layer must not ask ``router`` for its plan, or ``None``."""
    if not isinstance(router, Router):
        return f"{name} is a {type(router).__name__}"
    settings = router._obstacle()
    if settings is not None:
        return f"{name}: {settings}"
    return bypass_obstacle(name, router, (router.fused_rule.patched,))


def _rule(original: type[nn.Module], module_name: str, *, forward: type[Router]) -> PatchRule:
    plan = FusionPlan(("moe_route",))

    def plan_of(module: Any) -> FusionPlan | Refusal:
        reason = forward._obstacle(module)
        return plan if reason is None else Refusal(reason)

    patched = subclass(original, forward, module_name)
    return PatchRule(original, patched, "O2", plan_of, guarded=True)


RULES = {
    "MixtralTopKRouter": partial(_rule, forward=Float32Router),
    "Qwen2MoeTopKRouter": partial(_rule, forward=SoftmaxRouter),
    "DeepseekV3TopkRouter": partial(_rule, forward=GroupedSigmoid),
    "GptOssTopKRouter": partial(_rule, forward=SoftmaxOfChosen),
}
