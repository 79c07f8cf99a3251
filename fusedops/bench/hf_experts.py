"""The experts of Hugging Face transformers as peers: its loop and its ``grouped_mm`` path."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F

# (input, expert ids [tokens, top_k], their weights, gate_up [E, 2 * inner, hidden],
# down [E, hidden, inner]) -> [tokens, hidden]
Experts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


def installed() -> dict[str, Experts]:
    """Return label -> function of what transformers has; nothing where it is not installed."""
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    except ImportError:
        return {}
    experts: dict[str, Experts] = {}
    loop = getattr(MixtralExperts.forward, "__wrapped__", None)
    if loop is not None:
        experts["hf_loop"] = functools.partial(_run, loop)
    experts["hf_grouped_mm"] = functools.partial(_run, grouped_mm_experts_forward)
    return experts


def _run(
    experts_forward: Callable[..., torch.Tensor],
    input: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Run the forward of a Mixtral layer's experts: silu, [gate | up], no bias."""
    experts = types.SimpleNamespace(
        num_experts=gate_up.shape[0],
        gate_up_proj=gate_up,
        down_proj=down,
        act_fn=F.silu,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        _apply_gate=_apply_gate,
    )
    return experts_forward(experts, input, ids, weights)


def _apply_gate(z: torch.Tensor) -> torch.Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up
