"""Gated feed-forward layers: ``down(act(gate(x)) * up(x))``, known by their code.

With two projections they are one op with what follows them; with one for both, or where they must
be called, activation and product are one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedops.integrations.hf.rules.activations import (
    Function,
    Scale,
    apply,
    known_name_in,
    name_in,
    obstacle_in,
)
from fusedops.integrations.hf.rules.rule import NOT_APPLICABLE, FusionPlan, Refusal
from fusedops.integrations.hf.rules.torch_modules import (
    FASTER_PRODUCT,
    linear_obstacle,
    torchs_product_is_faster,
)
from fusedops.integrations.hf.symbolic import value_of
from fusedops.ops.geglu import geglu
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.swiglu import swiglu


class GateStep(NamedTuple):
    """``activation(gate(x)) * up(x)``, the first step of a layer.

    Attributes:
        projections: paths of the children that are gate and up; or of one, whose halves they are.
        activation: a child, or a function of torch.
        half: which half of one projection the gate is, 0 or 1.
        scales: factors between gate and activation.
    """

    projections: tuple[str, ...]
    activation: str | Function
    half: int = 0
    scales: tuple[Scale, ...] = ()


# Activation -> the argument of geglu that it is; silu is swiglu.
_GEGLUS = {"gelu": "none", "gelu_tanh": "tanh", "fast_gelu": "fast"}
GATES = ("silu", *_GEGLUS)


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, for an activation of ``GATES``."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, _GEGLUS[activation])


def _projections_obstacle(module: Any, gate: GateStep) -> str | None:
    """Return why the two projections must be called on their own, or ``None``."""
    if gate.scales:
        return f"{gate.projections[0]} is scaled"
    for name in gate.projections:
        projection = value_of(module, name)
        reason = linear_obstacle(name, projection)
        if reason is None and projection.bias is not None:
            reason = f"{name} has a bias"
        if reason is None and torchs_product_is_faster(projection.weight):
            reason = FASTER_PRODUCT
        if reason is not None:
            return reason
    return None


def gate_plan(module: Any, gate: GateStep) -> FusionPlan | Refusal:
    """Return which op does a gate now, with or without both projections, or why none does."""
    activation = name_in(module, gate.activation)
    if activation is None:
        return NOT_APPLICABLE
    children = (gate.activation,) if isinstance(gate.activation, str) else ()
    reason = obstacle_in(module, gate.activation)
    if reason is not None:
        return Refusal(reason)
    if len(gate.projections) == 2:
        reason = _projections_obstacle(module, gate)
        if reason is None:
            return FusionPlan(("linear_glu",), (*gate.projections, *children))
        reason = f"swiglu or geglu after the products: {reason}"
    if activation not in GATES:
        return Refusal(reason or f"its activation is {activation}")
    return FusionPlan(("swiglu" if activation == "silu" else "geglu",), children, reason)


def gated(module: Any, gate: GateStep, input: torch.Tensor) -> torch.Tensor:
    """Return what a gate computes, with one op where there is one."""
    plan = gate_plan(module, gate)
    if isinstance(plan, FusionPlan) and plan.ops == ("linear_glu",):
        weights = (value_of(module, name).weight for name in gate.projections)
        return linear_glu(input, *weights, activation=known_name_in(module, gate.activation))
    outputs = [value_of(module, name)(input) for name in gate.projections]
    if len(outputs) == 1:
        halves = outputs[0].chunk(2, dim=-1)
        outputs = [halves[gate.half], halves[1 - gate.half]]
    first, second = outputs
    for scale in gate.scales:
        first = apply(module, scale, first)
    if isinstance(plan, Refusal):
        return apply(module, gate.activation, first) * second
    return gated_product(first, second, known_name_in(module, gate.activation))
