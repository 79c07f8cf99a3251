"""Which activation a module or a function of torch computes, by the names of ``linear_act``.

A module's activation is known by its class, never by a name in a configuration. ``torch_modules``
and ``transformers_modules`` enter the classes that they know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fusedops._core.activation import ACTIVATIONS, FAST_GELU_SLOPE
from fusedops.integrations.hf.rules.rule import bypass_obstacle
from fusedops.integrations.hf.symbolic import at, value_of

# Class -> the name of its activation, or what tells it of an instance.
KNOWN: dict[type, str | Callable[[Any], str | None]] = {}
# Function that a module keeps as an attribute -> the name of its activation.
FUNCTIONS: dict[Any, str] = {}


class Function(NamedTuple):
    """A function of torch that is an activation.

    Attributes:
        name: of the function: ``"silu"``, ``"relu"``, ``"relu2"``, ``"gelu"``, or ``"swish"``:
            ``x * sigmoid(slope * x)``.
        parameter: GELU's ``approximate``, or the slope of ``"swish"``; or where a module keeps it:
            ``("attribute", path)``.
    """

    name: str
    parameter: str | float | tuple[str, str] = "none"


class DropoutFunction(NamedTuple):
    """``F.dropout`` in training.

    Attributes:
        probability: the number, or where the module keeps it: ``("attribute", path)``.
    """

    probability: float | tuple[str, str]

    def of(self, module: Any) -> float:
        """Return the probability with which it drops now."""
        probability: float = at(module, self.probability)
        return probability if module.training else 0.0


class Scale(NamedTuple):
    """A factor.

    Attributes:
        factor: the number, or where the module keeps it: ``("attribute", path)``.
    """

    factor: float | tuple[str, str]


def apply(
    module: Any, step: str | Function | DropoutFunction | Scale, input: torch.Tensor
) -> torch.Tensor:
    """Return what a child of a module, named by its path, or a function alone computes."""
    if isinstance(step, DropoutFunction):
        return F.dropout(input, step.of(module), module.training)
    if isinstance(step, Function):
        return _function(module, step)(input)
    if isinstance(step, Scale):
        return input * at(module, step.factor)
    output: torch.Tensor = value_of(module, step)(input)
    return output


def _function(module: Any, step: Function) -> Any:
    """Return an activation as the code computes it."""
    parameter = at(module, step.parameter)
    if step.name == "gelu":
        return partial(F.gelu, approximate=parameter)
    if step.name == "swish":
        return lambda input: input * torch.sigmoid(parameter * input)
    return {"silu": F.silu, "relu": F.relu, "relu2": ACTIVATIONS["relu2"]}[step.name]


def activation_name(module: Any) -> str | None:
    """Return the name of the activation that a module or function is, ``None`` if unknown."""
    if isinstance(module, FunctionType | BuiltinFunctionType):
        return FUNCTIONS.get(module)
    known = KNOWN.get(type(module))
    return known(module) if callable(known) else known


def known_activation(module: Any) -> str:
    """Return the name of the activation that a module computes, which must be known."""
    name = activation_name(module)
    assert name is not None
    return name


def activation_obstacle(name: str, module: Any) -> str | None:
    """Return why the activation ``module`` cannot be part of a fused op, or ``None``."""
    if activation_name(module) is None:
        return f"{name} is a {type(module).__name__}, which is no activation of linear_act"
    if not isinstance(module, nn.Module):
        return None
    return bypass_obstacle(name, module, (type(module),))


def name_in(module: Any, activation: str | Function) -> str | None:
    """Return the name of the activation that is a child of ``module``, or a function."""
    if isinstance(activation, str):
        return activation_name(value_of(module, activation))
    parameter = at(module, activation.parameter)
    if activation.name == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(parameter)
    if activation.name == "swish":
        return {1.0: "silu", FAST_GELU_SLOPE: "fast_gelu"}.get(parameter)
    return activation.name


def known_name_in(module: Any, activation: str | Function) -> str:
    """Return the same for an activation that must be known."""
    name = name_in(module, activation)
    assert name is not None
    return name


def obstacle_in(module: Any, activation: str | Function) -> str | None:
    """Return why an activation of ``module`` cannot be part of a fused op, or ``None``."""
    if isinstance(activation, str):
        return activation_obstacle(activation, value_of(module, activation))
    if name_in(module, activation) is None:
        parameter = at(module, activation.parameter)
        return f"{activation.name} with {parameter!r} is no activation of linear_act"
    return None
