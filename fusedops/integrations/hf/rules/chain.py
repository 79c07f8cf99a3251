"""Modules whose children run one after the other: linear, activation (and linear) are one op.

A step is the path of a child, an activation that is a function of torch, or a dropout that is one.
A dropout between activation and product that has no work, and an identity, are passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fusedops._core.activation import ACTIVATIONS
from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules.activations import (
    Function,
    activation_name,
    known_name_in,
    name_in,
    obstacle_in,
)
from fusedops.integrations.hf.rules.probes import empty_like_parameters
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    bypass_obstacle,
    configuration_obstacle,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.rules.torch_modules import (
    AS_FAST,
    is_linear,
    product_obstacle,
    torchs_product_is_faster,
    weight_of,
)
from fusedops.integrations.hf.symbolic import value_of
from fusedops.ops.linear_act import linear_act
from fusedops.ops.mlp import mlp

remember(nn.Dropout)
remember(nn.Identity)


class DropoutFunction(NamedTuple):
    """``F.dropout`` in training.

    Attributes:
        probability: the number, or where the module keeps it: ``("attribute", path)``.
    """

    probability: float | tuple[str, str]

    def of(self, module: Any) -> float:
        """Return the probability with which it drops now."""
        given = self.probability
        value = value_of(module, given[1]) if isinstance(given, tuple) else given
        return value if module.training else 0.0


class Scale(NamedTuple):
    """A factor.

    Attributes:
        factor: the number, or where the module keeps it: ``("attribute", path)``.
    """

    factor: float | tuple[str, str]


Step = str | Function | DropoutFunction | Scale


class Fusion(NamedTuple):
    """A part of a chain that is one op.

    Attributes:
        first: the linear layer.
        activation: its name.
        second: the linear layer behind it, or ``None``.
        steps: how many steps these are.
    """

    first: Any
    activation: str
    second: Any
    steps: int


class Residual(NamedTuple):
    """A sum at the end of a chain.

    Attributes:
        argument: name of the second argument, which is added; ``None``: the first one is.
        behind: the steps that follow.
    """

    argument: str | None
    behind: tuple[Step, ...]


def apply(module: Any, step: Step, input: torch.Tensor) -> torch.Tensor:
    """Return what a step alone computes."""
    if isinstance(step, DropoutFunction):
        return F.dropout(input, step.of(module), module.training)
    if isinstance(step, Function):
        return _function(module, step)(input)
    if isinstance(step, Scale):
        factor: Any = step.factor
        return input * (value_of(module, factor[1]) if isinstance(factor, tuple) else factor)
    output: torch.Tensor = value_of(module, step)(input)
    return output


def _function(module: Any, step: Function) -> Any:
    """Return an activation as the code computes it."""
    parameter = step.parameter_of(module)
    if step.name == "gelu":
        return partial(F.gelu, approximate=parameter)
    if step.name == "swish":
        return lambda input: input * torch.sigmoid(parameter * input)
    return {"silu": F.silu, "relu": F.relu, "relu2": ACTIVATIONS["relu2"]}[step.name]


def run(module: Any, steps: tuple[Step, ...], input: torch.Tensor) -> torch.Tensor:
    """Return what the steps compute one after the other, with one op where they can be one."""
    position = 0
    while position < len(steps):
        fusion = fusion_at(module, steps, position)
        if fusion is None:
            input = apply(module, steps[position], input)
            position += 1
            continue
        first, second, name = fusion.first, fusion.second, fusion.activation
        if second is None:
            input = linear_act(input, weight_of(first), first.bias, activation=name)
        else:
            weights = (weight_of(first), first.bias, weight_of(second), second.bias)
            input = mlp(input, *weights, activation=name)
        position += fusion.steps
    return input


def fusion_at(module: Any, steps: tuple[Step, ...], position: int) -> Fusion | None:
    """Return what may run as one op from a step on, or ``None``."""
    pair = _pair_at(module, steps, position)
    if pair is None or _pair_obstacle(module, pair) is not None:
        return None
    first, activation = value_of(module, pair.linear), known_name_in(module, pair.activation)
    if torchs_product_is_faster(first.weight):
        return None
    last = position + 2
    while last < len(steps) and _does_nothing(module, steps[last]):
        last += 1
    name = steps[last] if last < len(steps) else None
    if isinstance(name, str):
        second = value_of(module, name)
        if is_linear(second) and product_obstacle(name, second) is None:
            return Fusion(first, activation, second, last + 1 - position)
    return Fusion(first, activation, None, 2)


class _Pair(NamedTuple):
    """A linear layer, and what may be an activation behind it."""

    linear: str
    activation: str | Function


def _pair_at(module: Any, steps: tuple[Step, ...], position: int) -> _Pair | None:
    if position + 2 > len(steps):
        return None
    linear, activation = steps[position : position + 2]
    if not isinstance(linear, str) or not is_linear(value_of(module, linear)):
        return None
    if isinstance(activation, Function):
        return _Pair(linear, activation)
    if not isinstance(activation, str):
        return None
    child = value_of(module, activation)
    if isinstance(child, nn.Module) and (child._parameters or child._modules):
        return None  # a norm, an adapter or another layer
    return None if isinstance(child, _PASSED_OVER) else _Pair(linear, activation)


_PASSED_OVER = (nn.Dropout, nn.Identity)


def _pair_obstacle(module: Any, pair: _Pair) -> str | None:
    reason = product_obstacle(pair.linear, value_of(module, pair.linear))
    return reason or obstacle_in(module, pair.activation)


def _does_nothing(module: Any, step: Step) -> bool:
    """Return whether a step returns its input now, and nobody waits for its call."""
    if isinstance(step, DropoutFunction):
        return step.of(module) == 0.0
    if not isinstance(step, str):
        return False
    child = value_of(module, step)
    if type(child) is nn.Dropout and child.training and child.p > 0.0:
        return False
    return bypass_obstacle(step, child, _PASSED_OVER) is None


def _pairs(module: Any, steps: tuple[Step, ...]) -> list[_Pair]:
    pairs = (_pair_at(module, steps, position) for position in range(len(steps)))
    return [pair for pair in pairs if pair is not None]


def has_pair(module: Any, steps: tuple[Step, ...]) -> bool:
    """Return whether a chain has a linear layer with a known activation behind it."""
    pairs = _pairs(module, steps)
    return any(name_in(module, pair.activation) is not None for pair in pairs)


def _unknown_children(module: Any, steps: tuple[Step, ...]) -> list[str]:
    """Return what stands in the place of the linear layer and the activation."""
    children = [(step, value_of(module, step)) for step in steps if isinstance(step, str)]
    return [
        f"{name} is a {type(child).__name__}"
        for name, child in children
        if not is_linear(child) and not isinstance(child, _PASSED_OVER)
        if activation_name(child) is None
    ]


def chain_obstacle(module: Any, steps: tuple[Step, ...]) -> str | None:
    """Return why no part of a chain is one op now, or ``None``."""
    reasons = [_pair_obstacle(module, pair) for pair in _pairs(module, steps)]
    if None in reasons:
        return global_hooks()
    known = [reason for reason in reasons if reason is not None]
    return "; ".join(known or _unknown_children(module, steps)) or "it has no activation"


def _second_obstacle(module: Any, steps: tuple[Step, ...]) -> str | None:
    """Return why the linear layer behind a fused pair is called on its own, or ``None``."""
    linears = [
        step for step in steps if isinstance(step, str) and is_linear(value_of(module, step))
    ]
    reasons = (product_obstacle(name, value_of(module, name)) for name in linears)
    reason = next((reason for reason in reasons if reason is not None), None)
    return None if reason is None else f"linear_act alone: {reason}"


def chain_plan(module: Any, steps: tuple[Step, ...]) -> FusionPlan | Refusal:
    """Return which parts of a chain are one op now, or why none is."""
    if not _pairs(module, steps) and not any(_is_activation(module, step) for step in steps):
        return NOT_APPLICABLE
    reason = chain_obstacle(module, steps)
    if reason is not None:
        return Refusal(reason)
    if torchs_product_is_faster(empty_like_parameters(module)):
        return FusionPlan((), note=AS_FAST)
    ops: list[str] = []
    children: list[str] = []
    note, position = None, 0
    while position < len(steps):
        fusion = fusion_at(module, steps, position)
        if fusion is None:
            position += 1
            continue
        if fusion.second is None and note is None:
            note = _second_obstacle(module, steps[position + 2 :])
        ops.append("linear_act" if fusion.second is None else "mlp")
        behind = position + fusion.steps
        children += [step for step in steps[position:behind] if isinstance(step, str)]
        position = behind
    return FusionPlan(tuple(dict.fromkeys(ops)), tuple(children), note)


def chain_rule(
    original: type[nn.Module],
    module_name: str,
    steps: tuple[Step, ...],
    residual: Residual | None = None,
    method: str = "forward",
    condition: Callable[[Any], bool] | None = None,
) -> PatchRule:
    """Return the rule for a class of which a method is these steps, one after the other.

    Args:
        original: the class.
        module_name: holds the patched class.
        steps: what runs.
        residual: what is added to the result, and what follows the sum.
        method: the name of the method.
        condition: whether an instance in its current state computes this.
    """
    theirs: Any = getattr(original, method)

    def obstacle(module: Any) -> str | None:
        return configuration_obstacle(module, condition) or global_hooks()

    def run_all(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not runs_here(hidden_states) or obstacle(self) is not None:
            output: torch.Tensor = theirs(self, hidden_states)
            return output
        return run(self, steps, hidden_states)

    names = list(inspect.signature(theirs).parameters)[1:]
    added = names[0] if residual is None or residual.argument is None else residual.argument

    def run_and_add(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        # The steps are those of calls without the optional arguments.
        known = given.keys() == {names[0], added} and len(given) == len(args) + len(kwargs)
        if (
            residual is None
            or not known
            or not runs_here(given[names[0]])
            or obstacle(self) is not None
        ):
            return theirs(self, *args, **kwargs)
        total = run(self, steps, given[names[0]]) + given[added]
        return run(self, residual.behind, total)

    def plan(module: Any) -> FusionPlan | Refusal:
        reason = obstacle(module)
        return chain_plan(module, steps) if reason is None else Refusal(reason)

    forward = run_all if residual is None else run_and_add
    return PatchRule(
        original,
        subclass(original, None, module_name, **{method: forward}),
        "O2",
        plan,
        methods=(method,),
    )


def _is_activation(module: Any, step: Step) -> bool:
    """Return whether a step is an activation that is known."""
    if isinstance(step, str):
        return activation_name(value_of(module, step)) is not None
    return isinstance(step, Function)
