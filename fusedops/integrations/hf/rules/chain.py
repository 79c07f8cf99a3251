"""Modules whose children run one after the other: linear, activation (and linear) are one op.

A step is the path of a child, an activation or a dropout that is a function of torch, a factor, a
gate (``gated_mlp.py``), or a sum with an argument.
A dropout between activation and product that has no work, and an identity, are passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules.activations import (
    DropoutFunction,
    Function,
    Scale,
    activation_name,
    apply,
    known_name_in,
    name_in,
    obstacle_in,
)
from fusedops.integrations.hf.rules.gated_mlp import GateStep, gate_plan, gated
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


class Add(NamedTuple):
    """A sum with an argument of the method.

    Attributes:
        argument: its name; ``None``: that of the first one, which the steps begin with.
    """

    argument: str | None


Step = str | Function | DropoutFunction | Scale | GateStep | Add


class Fusion(NamedTuple):
    """A part of a chain that is one op.

    Attributes:
        first: the linear layer.
        activation: its name.
        second: the linear layer behind it, or ``None``.
        steps: which steps these are.
    """

    first: Any
    activation: str
    second: Any
    steps: tuple[Step, ...]


def run(
    module: Any, steps: tuple[Step, ...], input: torch.Tensor, added: Any = None
) -> torch.Tensor:
    """Return what the steps compute one after the other, with one op where they can be one.

    Args:
        module: whose steps they are.
        steps: what runs.
        input: of the first step.
        added: what ``Add`` adds.
    """
    for part in _parts(module, steps):
        if isinstance(part, Add):
            input = input + added
        elif isinstance(part, GateStep):
            input = gated(module, part, input)
        elif isinstance(part, Fusion):
            input = _fused(part, input)
        else:
            input = apply(module, part, input)
    return input


def _fused(fusion: Fusion, input: torch.Tensor) -> torch.Tensor:
    first, second, name = fusion.first, fusion.second, fusion.activation
    if second is None:
        return linear_act(input, weight_of(first), first.bias, activation=name)
    weights = (weight_of(first), first.bias, weight_of(second), second.bias)
    return mlp(input, *weights, activation=name)


def _gate_of(steps: tuple[Step, ...]) -> GateStep | None:
    return steps[0] if steps and isinstance(steps[0], GateStep) else None


def _parts(module: Any, steps: tuple[Step, ...]) -> list[Step | Fusion]:
    """Return the steps, with those that are one op now as one part.

    What follows a gate is one step each, as ``gate_plan`` says.
    """
    if _gate_of(steps) is not None:
        return list(steps)
    parts: list[Step | Fusion] = []
    position = 0
    while position < len(steps):
        fusion = _fusion_at(module, steps, position)
        parts.append(steps[position] if fusion is None else fusion)
        position += 1 if fusion is None else len(fusion.steps)
    return parts


def _fusion_at(module: Any, steps: tuple[Step, ...], position: int) -> Fusion | None:
    """Return what may run as one op from a step on, or ``None``."""
    pair = _pair_at(module, steps, position)
    if pair is None or _pair_obstacle(module, pair) is not None:
        return None
    first, activation = value_of(module, pair[0]), known_name_in(module, pair[1])
    if torchs_product_is_faster(first.weight):
        return None
    last = position + 2
    while last < len(steps) and _does_nothing(module, steps[last]):
        last += 1
    name = steps[last] if last < len(steps) else None
    if isinstance(name, str):
        second = value_of(module, name)
        if is_linear(second) and product_obstacle(name, second) is None:
            return Fusion(first, activation, second, steps[position : last + 1])
    return Fusion(first, activation, None, steps[position : position + 2])


_Pair = tuple[str, str | Function]  # a linear layer, and what may be an activation behind it


def _pair_at(module: Any, steps: tuple[Step, ...], position: int) -> _Pair | None:
    if position + 2 > len(steps):
        return None
    linear, activation = steps[position : position + 2]
    if not isinstance(linear, str) or not is_linear(value_of(module, linear)):
        return None
    if isinstance(activation, Function):
        return linear, activation
    if not isinstance(activation, str):
        return None
    child = value_of(module, activation)
    if isinstance(child, nn.Module) and (child._parameters or child._modules):
        return None  # a norm, an adapter or another layer
    return None if isinstance(child, _PASSED_OVER) else (linear, activation)


_PASSED_OVER = (nn.Dropout, nn.Identity)


def _pair_obstacle(module: Any, pair: _Pair) -> str | None:
    linear, activation = pair
    return product_obstacle(linear, value_of(module, linear)) or obstacle_in(module, activation)


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
    return any(name_in(module, activation) is not None for _, activation in _pairs(module, steps))


def _unknown_children(module: Any, steps: tuple[Step, ...]) -> list[str]:
    """Return what stands in the place of the linear layer and the activation."""
    children = [(step, value_of(module, step)) for step in steps if isinstance(step, str)]
    return [
        f"{name} is a {type(child).__name__}"
        for name, child in children
        if not is_linear(child) and not isinstance(child, _PASSED_OVER)
        if activation_name(child) is None
    ]


def _obstacle(module: Any, steps: tuple[Step, ...]) -> str | None:
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
    gate = _gate_of(steps)
    if gate is not None:
        return gate_plan(module, gate)
    if not _pairs(module, steps) and not any(_is_activation(module, step) for step in steps):
        return NOT_APPLICABLE
    reason = _obstacle(module, steps)
    if reason is not None:
        return Refusal(reason)
    if torchs_product_is_faster(empty_like_parameters(module)):
        return FusionPlan((), note=AS_FAST)
    parts = _parts(module, steps)
    fusions = [part for part in parts if isinstance(part, Fusion)]
    ops = ["linear_act" if fusion.second is None else "mlp" for fusion in fusions]
    note = None
    if "linear_act" in ops:
        fusion = fusions[ops.index("linear_act")]
        note = _second_obstacle(module, steps[steps.index(fusion.steps[0]) + 2 :])
    children = [step for fusion in fusions for step in fusion.steps if isinstance(step, str)]
    return FusionPlan(tuple(dict.fromkeys(ops)), tuple(children), note)


def chain_rule(
    original: type[nn.Module],
    module_name: str,
    steps: tuple[Step, ...],
    method: str = "forward",
    condition: Callable[[Any], bool] | None = None,
) -> PatchRule:
    """Return the rule for a class of which a method is these steps, one after the other.

    The original runs for calls with other arguments than those that the steps need.

    Args:
        original: the class.
        module_name: holds the patched class.
        steps: what runs.
        method: the name of the method.
        condition: whether an instance in its current state computes this.
    """
    theirs: Any = getattr(original, method)
    added = next((step.argument for step in steps if isinstance(step, Add)), None)
    names = list(inspect.signature(theirs).parameters)[1:]
    needed = {names[0], added}

    def obstacle(module: Any) -> str | None:
        return configuration_obstacle(module, condition) or global_hooks()

    def run_all(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not runs_here(hidden_states) or obstacle(self) is not None:
            output: torch.Tensor = theirs(self, hidden_states)
            return output
        return run(self, steps, hidden_states, hidden_states)

    def run_with_argument(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        # The steps are those of calls without the optional arguments.
        known = given.keys() == needed and len(given) == len(args) + len(kwargs)
        if not known or not runs_here(given[names[0]]) or obstacle(self) is not None:
            return theirs(self, *args, **kwargs)
        return run(self, steps, given[names[0]], given[added or names[0]])

    def plan(module: Any) -> FusionPlan | Refusal:
        reason = obstacle(module)
        return chain_plan(module, steps) if reason is None else Refusal(reason)

    gate = _gate_of(steps)
    packed = gate is not None and len(gate.projections) == 1
    return PatchRule(
        original,
        subclass(
            original, None, module_name, **{method: run_all if added is None else run_with_argument}
        ),
        "O1" if packed else "O2",
        plan,
        methods=(method,),
    )


def _is_activation(module: Any, step: Step) -> bool:
    """Return whether a step is an activation that is known."""
    if isinstance(step, str):
        return activation_name(value_of(module, step)) is not None
    return isinstance(step, Function)
