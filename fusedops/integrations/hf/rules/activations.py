"""Which activation a module or a function of torch computes, by the names of ``linear_act``.

``torch_modules`` and ``transformers_modules`` enter the classes that they know.
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
from fusedops.integrations.hf.original_code import WatchList, watch_list
from fusedops.integrations.hf.rules.rule import bypass_obstacle
from fusedops.integrations.hf.symbolic import at, value_of

# Class -> the name of its activation, or what tells it of an instance.
KNOWN: dict[type, str | Callable[[Any], str | None]] = {}
# Function that a module keeps as an attribute -> the name of its activation.
FUNCTIONS: dict[Any, str] = {}


class Function(NamedTuple):
    """A function of torch that is an activation."""

    name: str  # "silu", "relu", "relu2", "gelu", or "swish": ``x * sigmoid(slope * x)``
    # GELU's ``approximate``, or the slope of "swish"; or ``("attribute", path)`` in the module
    parameter: str | float | tuple[str, str] = "none"


class DropoutFunction(NamedTuple):
    """``F.dropout`` in training."""

    probability: float | tuple[str, str]  # or where the module keeps it: ``("attribute", path)``

    def of(self, module: Any) -> float:
        """Return the probability with which it drops now."""
        probability: float = at(module, self.probability)
        return probability if module.training else 0.0


class Scale(NamedTuple):
    """A factor, or where the module keeps it: ``("attribute", path)``."""

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


def activation_in(module: Any, activation: str | Function) -> tuple[str | None, str | None]:
    """Return the name of an activation of ``module``, and why no op may include it, or ``None``."""
    if isinstance(activation, str):
        child = value_of(module, activation)
        name, reason = activation_name(child), None
        if name is None:
            cls = type(child).__name__
            reason = f"{activation} is a {cls}, which is no activation of linear_act"
        elif isinstance(child, nn.Module):
            reason = bypass_obstacle(activation, child, (type(child),))
        return name, reason
    if activation.name not in FORMS:
        return activation.name, None
    parameter = at(module, activation.parameter)
    name = FORMS[activation.name].get(parameter)
    if name is None:
        return None, f"{activation.name} with {parameter!r} is no activation of linear_act"
    return name, None


def watched_activation(namespace: dict[str, Any], name: str) -> WatchList:
    """Return what an activation reads that a file takes from transformers' table by its name."""
    table = namespace.get("ACT2FN")
    return WatchList() if table is None else watch_list(type(table[name]))


# Function -> its parameter -> the name of the activation.
FORMS: dict[str, dict[Any, str]] = {
    "gelu": {"none": "gelu", "tanh": "gelu_tanh"},
    "swish": {1.0: "silu", FAST_GELU_SLOPE: "fast_gelu"},
}
