"""Modules whose children run one after the other: linear, activation (and linear) are one op.

A step is the path of a child, an activation or a dropout that is a function of torch, a factor, a
sum with an argument, or a gate: ``act(gate(x)) * up(x)``. A dropout between activation and product
that has no work, and an identity, are passed over. A gate of two projections is one op with them;
with one projection for both, or where they must be called, activation and product are one.

Where the module has ``tile_tokens`` (``patch`` sets it), linear, activation and linear go through
the op in tiles of tokens, and so do a gate with its projections and the linear layer behind it.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules.activations import (
    DropoutFunction,
    Function,
    Scale,
    activation_in,
    activation_name,
    apply,
)
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    bypass_obstacle,
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
from fusedops.integrations.hf.symbolic import at, value_of
from fusedops.ops.geglu import geglu
from fusedops.ops.linear_act import linear_act
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.mlp import mlp
from fusedops.ops.mlp_tiled import mlp_tiled
from fusedops.ops.swiglu import swiglu

remember(nn.Dropout)
remember(nn.Identity)
_PASSED_OVER = (nn.Dropout, nn.Identity)
# Activation -> the argument of gelu and geglu that it is; silu is swiglu.
GELUS = {"gelu": "none", "gelu_tanh": "tanh", "fast_gelu": "fast"}
GATES = ("silu", *GELUS)


class Add(NamedTuple):
    """A sum with an argument of the method, by its name; ``None``: with the input of the steps."""

    argument: str | None


class GateStep(NamedTuple):
    """``activation(gate(x)) * up(x)``, the first step of a layer.

    With a limit the first product is at most this, and the second between its negative and it.
    """

    # Paths of the children that are gate and up; or of one, whose halves they are
    projections: tuple[str, ...]
    activation: str | Function  # a child, or a function of torch
    half: int = 0  # which half of one projection the gate is
    scales: tuple[Scale, ...] = ()  # factors between gate and activation
    limit: float | tuple[str, str] | None = None  # or where it is: ``("attribute", path)``


Step = str | Function | DropoutFunction | Scale | GateStep | Add


class Fusion(NamedTuple):
    """A part of a chain that is one op."""

    first: Any  # the linear layer
    activation: str
    second: Any  # the linear layer behind it, or ``None``
    steps: tuple[Step, ...]  # those that it computes
    note: str | None = None  # why a linear layer behind it is called
    up: Any = None  # the linear layer whose product the activation is multiplied by


def run(
    module: Any, steps: tuple[Step, ...], input: torch.Tensor, added: Any = None
) -> torch.Tensor:
    """Return what the steps of a module compute one after the other, with one op where they can be.

    ``added`` is what ``Add`` adds.
    """
    for part in _parts(module, steps):
        if isinstance(part, Add):
            input = input + added
        elif isinstance(part, GateStep):
            input = gated(module, part, input)
        elif isinstance(part, Fusion):
            input = _fused(part, input, _tile_tokens(module))
        else:
            input = apply(module, part, input)
    return input


def _tile_tokens(module: Any) -> int | None:
    return getattr(module, "tile_tokens", None)


def _fused(fusion: Fusion, input: torch.Tensor, tile_tokens: int | None) -> torch.Tensor:
    first, second, name = fusion.first, fusion.second, fusion.activation
    if second is None:
        return linear_act(input, weight_of(first), first.bias, activation=name)
    weights = (weight_of(first), first.bias, weight_of(second), second.bias)
    if fusion.up is None:
        return mlp(input, *weights, activation=name, tile_tokens=tile_tokens)
    assert tile_tokens is not None
    up = weight_of(fusion.up)
    return mlp_tiled(input, *weights, activation=name, tile_tokens=tile_tokens, up_weight=up)


def _gate_of(steps: tuple[Step, ...]) -> GateStep | None:
    return steps[0] if steps and isinstance(steps[0], GateStep) else None


def _parts(module: Any, steps: tuple[Step, ...]) -> list[Step | Fusion]:
    """Return the steps, with those that are one op now as one part.

    What follows a gate is one step each, as ``gate_plan`` says, unless it goes in tiles.
    """
    gate = _gate_of(steps)
    if gate is not None:
        tiled = _tiled_gate(module, gate, steps)
        return [tiled, *steps[2:]] if isinstance(tiled, Fusion) else list(steps)
    parts: list[Step | Fusion] = []
    position = 0
    while position < len(steps):
        fusion = _fusion_at(module, steps, position)
        parts.append(fusion if isinstance(fusion, Fusion) else steps[position])
        position += len(fusion.steps) if isinstance(fusion, Fusion) else 1
    return parts


def _fusion_at(module: Any, steps: tuple[Step, ...], position: int) -> Fusion | str | None:
    """Return what runs as one op from a step on.

    It is a reason where a linear layer and what follows it are called, and ``None`` where no linear
    layer with a possible activation behind it begins.
    """
    if position + 2 > len(steps):
        return None
    linear, activation = steps[position : position + 2]
    if not isinstance(linear, str) or not isinstance(activation, str | Function):
        return None
    first = value_of(module, linear)
    if not is_linear(first):
        return None
    child = value_of(module, activation) if isinstance(activation, str) else None
    if isinstance(child, nn.Module) and (child._parameters or child._modules):
        return None  # a norm, an adapter or another layer
    if isinstance(child, _PASSED_OVER):
        return None
    name, reason = activation_in(module, activation)
    reason = product_obstacle(linear, first) or reason
    if reason is not None or name is None:
        return reason
    if torchs_product_is_faster(first.weight):
        return AS_FAST
    last = position + 2
    while last < len(steps) and _does_nothing(module, steps[last]):
        last += 1
    pair, following = steps[position : position + 2], steps[last] if last < len(steps) else None
    second = value_of(module, following) if isinstance(following, str) else None
    if not isinstance(following, str) or not is_linear(second):
        return Fusion(first, name, None, pair)
    reason = product_obstacle(following, second)
    if reason is not None:
        return Fusion(first, name, None, pair, f"linear_act alone: {reason}")
    return Fusion(first, name, second, steps[position : last + 1])


def _tiled_gate(module: Any, gate: GateStep, steps: tuple[Step, ...]) -> Fusion | str | None:
    """Return the op of a gate and the linear layer behind it in tiles, or why there is none.

    ``None``: ``gate_plan`` says why, or no tiles are asked for.
    """
    plan, (activation, _) = gate_plan(module, gate), activation_in(module, gate.activation)
    ops = plan.ops if isinstance(plan, FusionPlan) else ()
    if _tile_tokens(module) is None or activation is None or ops != ("linear_glu",):
        return None
    following = steps[1] if len(steps) > 1 else None
    if not isinstance(following, str):
        return "no linear layer follows the gate"
    first, up = (value_of(module, name) for name in gate.projections)
    down = value_of(module, following)
    if gate.limit is not None:
        return "its gate is clamped"
    return product_obstacle(following, down) or Fusion(first, activation, down, steps[:2], up=up)


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


def chain_plan(module: Any, steps: tuple[Step, ...]) -> FusionPlan | Refusal:
    """Return which parts of a chain are one op now, or why none is."""
    gate = _gate_of(steps)
    if gate is not None:
        tiled, gate_alone = _tiled_gate(module, gate, steps), gate_plan(module, gate)
        if isinstance(tiled, str) and isinstance(gate_alone, FusionPlan):
            return gate_alone._replace(note=f"not in tiles: {tiled}")
        if tiled is None or isinstance(gate_alone, Refusal):
            return gate_alone
        absorbs = (*gate_alone.absorbs, str(steps[1]))
        return FusionPlan(("mlp_tiled",), absorbs, _tiles_note(module))
    children = {step: value_of(module, step) for step in steps if isinstance(step, str)}
    activations = [name for name, child in children.items() if activation_name(child) is not None]
    begins = [_fusion_at(module, steps, position) for position in range(len(steps))]
    if not any(begins) and not activations and not any(isinstance(s, Function) for s in steps):
        return NOT_APPLICABLE
    fusions = [part for part in _parts(module, steps) if isinstance(part, Fusion)]
    if not fusions and AS_FAST not in begins:
        # Where no linear layer is in front of an activation: what is there instead.
        reasons = [begin for begin in begins if isinstance(begin, str)] or [
            f"{name} is a {type(child).__name__}"
            for name, child in children.items()
            if name not in activations
            if not is_linear(child) and not isinstance(child, _PASSED_OVER)
        ]
        return Refusal("; ".join(reasons) or "it has no activation")
    hooks = global_hooks()
    if hooks is not None:
        return Refusal(hooks)
    if not fusions:
        return FusionPlan((), note=AS_FAST)
    pairs = "mlp" if _tile_tokens(module) is None else "mlp_tiled"
    ops = ["linear_act" if fusion.second is None else pairs for fusion in fusions]
    note = next((fusion.note for fusion in fusions if fusion.note is not None), None)
    if note is None and "mlp_tiled" in ops:
        note = _tiles_note(module)
    absorbed = [step for fusion in fusions for step in fusion.steps if isinstance(step, str)]
    return FusionPlan(tuple(dict.fromkeys(ops)), tuple(absorbed), note)


def _tiles_note(module: Any) -> str:
    return f"in tiles of {_tile_tokens(module)} tokens"


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, for an activation of ``GATES``."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, GELUS[activation])


def _projections_obstacle(module: Any, gate: GateStep) -> str | None:
    """Return why the two projections must be called on their own, or ``None``."""
    if gate.scales:
        return f"{gate.projections[0]} is scaled"
    for name in gate.projections:
        projection = value_of(module, name)
        reason = product_obstacle(name, projection)
        if reason is None and projection.bias is not None:
            reason = f"{name} has a bias"
        if reason is None and torchs_product_is_faster(projection.weight):
            reason = "torch's product of float32 is faster on this processor"
        if reason is not None:
            return reason
    return None


def gate_plan(module: Any, gate: GateStep) -> FusionPlan | Refusal:
    """Return which op does a gate now, with or without both projections, or why none does."""
    activation, reason = activation_in(module, gate.activation)
    if activation is None:
        return NOT_APPLICABLE
    if reason is not None:
        return Refusal(reason)
    limit = None if gate.limit is None else at(module, gate.limit)
    if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
        return Refusal(f"the limit of its gate is {limit}")
    children = (gate.activation,) if isinstance(gate.activation, str) else ()
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
    plan, (activation, _) = gate_plan(module, gate), activation_in(module, gate.activation)
    ops = plan.ops if isinstance(plan, FusionPlan) else ()
    if activation is not None and ops == ("linear_glu",):
        weights = (weight_of(value_of(module, name)) for name in gate.projections)
        limit = None if gate.limit is None else at(module, gate.limit)
        return linear_glu(input, *weights, activation=activation, limit=limit)
    outputs = [value_of(module, name)(input) for name in gate.projections]
    if len(outputs) == 1:
        halves = outputs[0].chunk(2, dim=-1)
        outputs = [halves[gate.half], halves[1 - gate.half]]
    first, second = outputs
    for scale in gate.scales:
        first = apply(module, scale, first)
    if gate.limit is not None:
        limit = at(module, gate.limit)
        first, second = first.clamp(max=limit), second.clamp(min=-limit, max=limit)
    if activation is None or not ops:
        return apply(module, gate.activation, first) * second
    return gated_product(first, second, activation)


def chain_rule(
    original: type[nn.Module],
    steps: tuple[Step, ...],
    method: str = "forward",
    condition: Callable[[Any], bool] = lambda module: True,
) -> PatchRule:
    """Return the rule for a class of which a method is these steps, one after the other.

    The original runs for calls with other arguments than those that the steps need, and where an
    instance does not fulfil the condition.
    """
    theirs: Any = getattr(original, method)
    names = list(inspect.signature(theirs).parameters)[1:]
    added = next((step.argument for step in steps if isinstance(step, Add)), None) or names[0]

    def obstacle(module: Any) -> str | None:
        return global_hooks() if condition(module) else "it is configured to compute something else"

    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        # The steps are those of calls without the optional arguments.
        known = given.keys() == {names[0], added} and len(given) == len(args) + len(kwargs)
        if not known or not runs_here(given[names[0]]) or obstacle(self) is not None:
            return theirs(self, *args, **kwargs)
        return run(self, steps, given[names[0]], given[added])

    def plan(module: Any) -> FusionPlan | Refusal:
        reason = obstacle(module)
        return chain_plan(module, steps) if reason is None else Refusal(reason)

    # ``apply_chunking_to_forward`` counts the arguments of the method.
    fused.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    gate = _gate_of(steps)
    packed = gate is not None and len(gate.projections) == 1
    patched = subclass(original, **{method: fused}, tile_tokens=None)
    return PatchRule(original, patched, "O1" if packed else "O2", plan, methods=(method,))


class Sequential(nn.Sequential):
    """``nn.Sequential`` that runs linear, activation (and linear) as one op where they follow."""

    tile_tokens: int | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the last module's output."""
        if not runs_here(input) or global_hooks() is not None:
            output: torch.Tensor = super().forward(input)
            return output
        return run(self, tuple(self._modules), input)


def _sequential_plan(module: Any) -> FusionPlan | Refusal:
    pairs = itertools.pairwise(module._modules.values())
    if not any(is_linear(first) and activation_name(second) for first, second in pairs):
        return NOT_APPLICABLE
    return chain_plan(module, tuple(module._modules))


RULES = (PatchRule(nn.Sequential, Sequential, "O2", _sequential_plan),)
