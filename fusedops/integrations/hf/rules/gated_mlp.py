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
from fusedops.integrations.hf.rules.chain import Step, apply
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    configuration_obstacle,
    global_hooks,
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
    """

    gate: str
    up: str
    activation: str | Function
    last: tuple[Step, ...] = ()


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


def _end(module: Any, names: GatedNames | PackedNames, hidden: torch.Tensor) -> torch.Tensor:
    for step in names.last:
        hidden = apply(module, step, hidden)
    return hidden


class _GatedMLP(nn.Module):
    """The forward of every patched gated feed-forward layer."""

    names: GatedNames

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        name = known_name_in(self, self.names.activation)
        gate, up = value_of(self, self.names.gate), value_of(self, self.names.up)
        if projections_obstacle(self, self.names) is None:
            hidden = linear_glu(x, gate.weight, up.weight, activation=name)
        else:
            hidden = gated_product(gate(x), up(x), name)
        return _end(self, self.names, hidden)


# Activation -> the argument of geglu that it is; silu is swiglu.
_GEGLUS = {"gelu": "none", "gelu_tanh": "tanh", "fast_gelu": "fast"}
GATES = ("silu", *_GEGLUS)


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, for an activation of ``GATES``."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, _GEGLUS[activation])


def _obstacle(module: Any, names: GatedNames) -> str | None:
    """Return why the layer must stay unchanged, or ``None``."""
    reason = obstacle_in(module, names.activation) or global_hooks()
    if reason is None and name_in(module, names.activation) not in GATES:
        reason = projections_obstacle(module, names)
    return reason


def projections_obstacle(module: Any, names: GatedNames) -> str | None:
    """Return why the two projections must be called on their own, or ``None``."""
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


def gated_mlp_rule(
    original: type[nn.Module],
    module_name: str,
    names: GatedNames,
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
    projections = (names.gate, names.up)

    def calls(module: Any) -> tuple[str, ...]:
        return () if projections_obstacle(module, names) is None else projections

    def note(module: Any) -> str | None:
        reason = projections_obstacle(module, names)
        return None if reason is None else f"swiglu or geglu after the products: {reason}"

    return PatchRule(
        original,
        subclass(original, _GatedMLP, module_name, names=names),
        ("linear_glu",),
        "O2",
        obstacle=lambda module: (
            configuration_obstacle(module, condition) or _obstacle(module, names)
        ),
        applies=lambda module: name_in(module, names.activation) is not None,
        absorbs=(*projections, *_children(names.activation)),
        calls=calls,
        note=note,
        guarded=True,
    )


def _children(activation: str | Function) -> tuple[str, ...]:
    return (activation,) if isinstance(activation, str) else ()


class _PackedGatedMLP(nn.Module):
    """The forward of a gated feed-forward layer whose two projections are one linear layer."""

    names: PackedNames

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        names = self.names
        halves = value_of(self, names.packed)(hidden_states).chunk(2, dim=-1)
        activation = known_name_in(self, names.activation)
        gate, up = halves[names.gate], halves[1 - names.gate]
        return _end(self, names, gated_product(gate, up, activation))


def _packed_obstacle(module: Any, names: PackedNames) -> str | None:
    reason = obstacle_in(module, names.activation) or global_hooks()
    if reason is None and name_in(module, names.activation) not in GATES:
        reason = f"its activation is {name_in(module, names.activation)}"
    return reason


def packed_gated_mlp_rule(
    original: type[nn.Module],
    module_name: str,
    names: PackedNames,
    condition: Callable[[Any], bool] | None = None,
) -> PatchRule:
    """Return the rule for a layer of one projection for gate and up, and another one down.

    The arguments are those of ``gated_mlp_rule``.
    """
    return PatchRule(
        original,
        subclass(original, _PackedGatedMLP, module_name, names=names),
        ("swiglu",),
        "O1",
        obstacle=lambda module: (
            configuration_obstacle(module, condition) or _packed_obstacle(module, names)
        ),
        applies=lambda module: name_in(module, names.activation) is not None,
        absorbs=_children(names.activation),
        guarded=True,
    )
