"""Feed-forward layers inside the forward of a layer: two linear children and an activation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedops.integrations.hf.rules.activations import activation_obstacle, known_activation
from fusedops.integrations.hf.rules.rule import global_hooks
from fusedops.integrations.hf.rules.torch_modules import linear_obstacle
from fusedops.ops.linear_act import linear_act
from fusedops.ops.mlp import mlp


class Names(NamedTuple):
    """Names of the children, in the order in which they run."""

    first: str = "fc1"
    activation: str = "activation_fn"
    second: str = "fc2"


def fused(module: Any, names: Names, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return ``second(activation(first(hidden_states)))`` as one op."""
    first, activation, second = (getattr(module, name) for name in names)
    weights = (first.weight, first.bias, second.weight, second.bias)
    return mlp(hidden_states, *weights, activation=known_activation(activation))


def dense_act(linear: Any, activation: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return ``activation(linear(hidden_states))`` as one op."""
    return linear_act(
        hidden_states, linear.weight, linear.bias, activation=known_activation(activation)
    )


def obstacle(module: Any, names: Names) -> str | None:
    """Return why ``fused`` must not run now, or ``None``."""
    return linear_obstacle(names.second, getattr(module, names.second)) or dense_act_obstacle(
        module, names.first, names.activation
    )


def dense_act_obstacle(module: Any, linear: str, activation: str) -> str | None:
    """Return why ``dense_act`` must not do the work of these two children now, or ``None``."""
    return (
        linear_obstacle(linear, getattr(module, linear))
        or activation_obstacle(activation, getattr(module, activation))
        or global_hooks()
    )
