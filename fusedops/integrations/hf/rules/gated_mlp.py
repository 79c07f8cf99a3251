"""Gated feed-forward layers: ``down(act(gate(x)) * up(x))``, known by their code.

With two projections they are one op with what follows them; with one for both, or where they must
be called, activation and product are one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.integrations.hf.rules.activations import (
    Function,
    known_name_in,
    name_in,
    obstacle_in,
)
from fusedops.integrations.hf.rules.chain import Scale, Step, apply
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    configuration_obstacle,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.rules.torch_modules import (
    FASTER_PRODUCT,
    linear_obstacle,
    torchs_product_is_faster,
)
from fusedops.integrations.hf.symbolic import value_of
from fusedops.ops.geglu import geglu
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.swiglu import swiglu


class GatedNames(NamedTuple):
    """Names of the children; a name may be a path.

    Attributes:
        gate: the projection behind which the activation is.
        up: the other one.
        activation: a child, or a function of torch.
        last: what follows their product, steps of a chain (``chain.py``).
        scales: factors between gate and activation.
    """

    gate: str
    up: str
    activation: str | Function
    last: tuple[Step, ...] = ()
    scales: tuple[Scale, ...] = ()


class PackedNames(NamedTuple):
    """Names of the children where one projection is both; a name may be a path.

    Attributes:
        packed: the projection.
        activation: a child, or a function of torch.
        gate: the half behind which the activation is, 0 or 1.
        last: what follows the product of the halves, steps of a chain (``chain.py``).
    """

    packed: str
    activation: str | Function
    gate: int
    last: tuple[Step, ...] = ()


# Activation -> the argument of geglu that it is; silu is swiglu.
_GEGLUS = {"gelu": "none", "gelu_tanh": "tanh", "fast_gelu": "fast"}
GATES = ("silu", *_GEGLUS)


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, for an activation of ``GATES``."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, _GEGLUS[activation])


def projections_obstacle(module: Any, names: GatedNames) -> str | None:
    """Return why the two projections must be called on their own, or ``None``."""
    if names.scales:
        return f"{names.gate} is scaled"
    for name in (names.gate, names.up):
        projection = value_of(module, name)
        reason = linear_obstacle(name, projection)
        if reason is None and projection.bias is not None:
            reason = f"{name} has a bias"
        if reason is None and torchs_product_is_faster(projection.weight):
            reason = FASTER_PRODUCT
        if reason is not None:
            return reason
    return None


def _halves(
    module: Any, names: GatedNames | PackedNames, input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the activation is applied to, and the factor."""
    if isinstance(names, GatedNames):
        gate = value_of(module, names.gate)(input)
        for scale in names.scales:
            gate = apply(module, scale, gate)
        return gate, value_of(module, names.up)(input)
    halves = value_of(module, names.packed)(input).chunk(2, dim=-1)
    return halves[names.gate], halves[1 - names.gate]


def _plan(module: Any, names: GatedNames | PackedNames) -> FusionPlan | Refusal:
    """Return which op does the gate, with or without both projections."""
    activation = name_in(module, names.activation)
    if activation is None:
        return NOT_APPLICABLE
    children = (names.activation,) if isinstance(names.activation, str) else ()
    reason = obstacle_in(module, names.activation) or global_hooks()
    if reason is not None:
        return Refusal(reason)
    if isinstance(names, GatedNames):
        reason = projections_obstacle(module, names)
        if reason is None:
            return FusionPlan(("linear_glu",), (names.gate, names.up, *children))
        reason = f"swiglu or geglu after the products: {reason}"
    if activation not in GATES:
        return Refusal(reason or f"its activation is {activation}")
    return FusionPlan(("swiglu" if activation == "silu" else "geglu",), children, reason)


def gated_mlp_rule(
    original: type[nn.Module],
    module_name: str,
    names: GatedNames | PackedNames,
    condition: Callable[[Any], bool] | None = None,
) -> PatchRule:
    """Return the rule for a layer of ``down(activation(gate(x)) * up(x))``.

    Where a projection must be called, because it has a bias or an adapter took its place,
    activation and product are still one op.

    Args:
        original: the class.
        module_name: holds the patched class.
        names: of its children.
        condition: whether an instance in its current state computes this.
    """
    theirs: Any = original.forward

    def plan(module: Any) -> FusionPlan | Refusal:
        reason = configuration_obstacle(module, condition)
        return _plan(module, names) if reason is None else Refusal(reason)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        current = plan(self) if runs_here(x) else NOT_APPLICABLE
        if isinstance(current, Refusal):
            output: torch.Tensor = theirs(self, x)
            return output
        activation = known_name_in(self, names.activation)
        if isinstance(names, GatedNames) and current.ops == ("linear_glu",):
            weights = (value_of(self, name).weight for name in (names.gate, names.up))
            hidden = linear_glu(x, *weights, activation=activation)
        else:
            hidden = gated_product(*_halves(self, names, x), activation)
        for step in names.last:
            hidden = apply(self, step, hidden)
        return hidden

    level = "O2" if isinstance(names, GatedNames) else "O1"
    return PatchRule(original, subclass(original, None, module_name, forward=forward), level, plan)
