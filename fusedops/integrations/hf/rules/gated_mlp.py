"""Gated feed-forward layers of transformers' families: ``down(act(gate(x)) * up(x))``.

With two projections they are one op with what follows them; with one for both, or where they must
be called, activation and product are one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules.rule import PatchRule, copyable, global_hooks, subclass
from fusedops.integrations.hf.rules.torch_modules import linear_obstacle
from fusedops.integrations.hf.rules.transformers_modules import (
    activation_name,
    activation_obstacle,
    known_activation,
)
from fusedops.ops.geglu import geglu
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.swiglu import swiglu


class _GatedMLP(nn.Module):
    """The forward of every patched gated feed-forward layer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        name = known_activation(self.act_fn)
        if _projections_obstacle(self) is None:
            gate, up = self.gate_proj.weight, self.up_proj.weight
            hidden = linear_glu(x, gate, up, activation=name)
        else:
            hidden = _gated(self.gate_proj(x), self.up_proj(x), name)
        return self.down_proj(hidden)


GATES = ("silu", "gelu", "gelu_tanh")


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, for an activation of ``GATES``."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, "tanh" if activation == "gelu_tanh" else "none")


def _obstacle(module: Any) -> str | None:
    """Return why the layer must stay unchanged, or ``None``."""
    reason = activation_obstacle("act_fn", module.act_fn) or global_hooks()
    if reason is None and activation_name(module.act_fn) not in GATES:
        reason = _projections_obstacle(module)
    return reason


def _projections_obstacle(module: Any) -> str | None:
    """Return why the two projections must be called on their own, or ``None``."""
    for name in _PROJECTIONS:
        projection = getattr(module, name)
        reason = linear_obstacle(name, projection)
        if reason is None and projection.bias is not None:
            reason = f"{name} has a bias"
        if reason is not None:
            return reason
    return None


_PROJECTIONS = ("gate_proj", "up_proj")


@copyable
def gated_mlp_rule(original: type[nn.Module], module_name: str) -> PatchRule:
    """Return the rule for a layer of ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``.

    Where a projection must be called, because it has a bias or an adapter took its place,
    activation and product are still one op.
    """
    return PatchRule(
        original,
        subclass(original, _GatedMLP, module_name),
        ("linear_glu",),
        "O2",
        obstacle=_obstacle,
        absorbs=(*_PROJECTIONS, "act_fn"),
        calls=lambda module: () if _projections_obstacle(module) is None else _PROJECTIONS,
        note=_note,
        guarded=True,
    )


def _note(module: Any) -> str | None:
    reason = _projections_obstacle(module)
    return None if reason is None else f"swiglu or geglu after the products: {reason}"


class _PackedGatedMLP(nn.Module):
    """The forward of a gated feed-forward layer whose two projections are one linear layer."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        name = known_activation(self.activation_fn)
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(_gated(gate, up, name))


def _packed_obstacle(module: Any) -> str | None:
    reason = activation_obstacle("activation_fn", module.activation_fn) or global_hooks()
    if reason is None and activation_name(module.activation_fn) not in GATES:
        reason = f"activation_fn is a {type(module.activation_fn).__name__}"
    return reason


@copyable
def packed_gated_mlp_rule(original: type[nn.Module], module_name: str) -> PatchRule:
    """Return the rule for a layer of ``gate_up_proj``, ``down_proj`` and ``activation_fn``."""
    return PatchRule(
        original,
        subclass(original, _PackedGatedMLP, module_name),
        ("swiglu",),
        "O1",
        obstacle=_packed_obstacle,
        absorbs=("activation_fn",),
        guarded=True,
    )
