"""The mathematics of routing in eager torch: scores, the choice, the weights and their gradient.

This is the specification of ``moe_route``; what a capacity drops is in ``kernels/_moe_drop.py``.
Everything works on logits that ``prepare`` has widened.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops._core import dtypes, philox
from fusedops.kernels._arguments import RouteOptions


def jitter_factors(logits: torch.Tensor, seed: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return factors in [1 - jitter, 1 + jitter), one per element, of the statistics dtype."""
    uniform = (philox.words(logits.numel(), seed) >> 8).to(dtypes.statistics_dtype(logits.dtype))
    return (1.0 + jitter * (uniform * 2.0**-23 - 1.0)).view(logits.shape)


def prepare(logits: torch.Tensor, seed: torch.Tensor | None, jitter: float) -> torch.Tensor:
    """Widen the logits and apply the jitter; NaN becomes -inf, +inf the largest finite number."""
    wide = logits.to(dtypes.statistics_dtype(logits.dtype))
    wide = wide.masked_fill(wide.isnan(), -torch.inf)
    if seed is not None:
        wide = wide * jitter_factors(logits, seed, jitter)
    return wide.clamp(max=torch.finfo(wide.dtype).max)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return softmax over the last dim, 0 where nothing is left."""
    if x.shape[-1] == 0:
        return x
    dead = (x == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(x.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)


def normalized_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return sigmoids divided by their sum over the last dim.

    As a softmax of their logarithms: where all sigmoids underflow their quotients do not.
    """
    # Not logsigmoid, whose form in ONNX is the logarithm of a sigmoid that underflows.
    return softmax(-F.softplus(-x, threshold=40.0))


def scores(x: torch.Tensor, score: str) -> torch.Tensor:
    return torch.sigmoid(x) if score == "sigmoid" else softmax(x)


def choose(x: torch.Tensor, bias: torch.Tensor | None, rule: RouteOptions) -> torch.Tensor:
    """Return the int32 ids ``[T, top_k]`` of the best experts, best first.

    Scores rise with the logits: unless something is added to them the logits decide, which makes
    different logits of equal rounded score no tie.
    """
    keys = x
    limits_groups = rule.topk_groups < rule.num_groups
    if bias is not None or (limits_groups and rule.group_score == "top2_sum"):
        keys = scores(x, rule.score)
        if bias is not None:
            keys = keys + bias.to(keys.dtype)
            keys = keys.masked_fill(keys.isnan(), -torch.inf)
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    if limits_groups:
        allowed = _allowed(keys, rule).gather(-1, order)
        first = allowed.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
        order = order.gather(-1, first)
    return order[:, : rule.top_k].to(torch.int32).contiguous()


def _allowed(keys: torch.Tensor, rule: RouteOptions) -> torch.Tensor:
    """Return which experts stand in the best groups, ``[T, E]`` bool."""
    tokens, experts = keys.shape
    groups = keys.view(tokens, rule.num_groups, experts // rule.num_groups)
    if rule.group_score == "max":
        group_keys = groups.amax(-1)
    else:
        group_keys = groups.topk(2, dim=-1).values.sum(-1)
        group_keys = group_keys.masked_fill(group_keys.isnan(), -torch.inf)
    best = group_keys.sort(dim=-1, descending=True, stable=True).indices[:, : rule.topk_groups]
    allowed = torch.zeros_like(group_keys, dtype=torch.bool).scatter(1, best, True)
    return allowed.repeat_interleave(groups.shape[-1], dim=1)


def probabilities(x: torch.Tensor, expert_ids: torch.Tensor, rule: RouteOptions) -> torch.Tensor:
    ids = expert_ids.long()
    if rule.score == "sigmoid":
        chosen = x.gather(1, ids)
        chosen = normalized_sigmoid(chosen) if rule.normalize else torch.sigmoid(chosen)
    elif rule.normalize:
        # softmax over all, divided by its sum over the chosen: softmax over the chosen.
        chosen = softmax(x.gather(1, ids))
    else:
        chosen = softmax(x).gather(1, ids)
    return chosen * rule.scaling


def gradient(
    grad_probs: torch.Tensor, x: torch.Tensor, expert_ids: torch.Tensor, rule: RouteOptions
) -> torch.Tensor:
    """Return the gradient of the prepared logits ``x`` from that of undropped weights.

    With s the score and g the incoming gradient times the scaling:

        softmax over the chosen   dx_i = s_i (g_i - sum_chosen g s)
        softmax over all          dx_i = s_i ([i chosen] g_i - sum_chosen g s)
        sigmoid                   dx_i = s_i (1 - s_i) g_i
        sigmoid, normalised       dx_i = w_i (1 - s_i) (g_i - sum_chosen g w),  w = s / sum_chosen s
    """
    ids = expert_ids.long()
    g = grad_probs.to(x.dtype) * rule.scaling
    zeros = torch.zeros_like(x)
    if rule.score == "softmax" and not rule.normalize:
        s = softmax(x)
        along = (g * s.gather(1, ids)).sum(-1, keepdim=True)
        return s * (zeros.scatter_add(1, ids, g) - along)
    chosen = x.gather(1, ids)
    if rule.score == "softmax":
        s = softmax(chosen)
        dx = s * (g - (g * s).sum(-1, keepdim=True))
    elif rule.normalize:
        w = normalized_sigmoid(chosen)
        dx = w * torch.sigmoid(-chosen) * (g - (g * w).sum(-1, keepdim=True))
    else:
        dx = torch.sigmoid(chosen) * torch.sigmoid(-chosen) * g
    return zeros.scatter_add(1, ids, dx)
