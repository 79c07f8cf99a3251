"""Which norm, feed-forward layer or gate of experts an expression is (``symbolic.py``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedops.integrations.hf.rules.activations import DropoutFunction, Function, Scale
from fusedops.integrations.hf.rules.chain import Add, GateStep, Step
from fusedops.integrations.hf.rules.torch_modules import LinearLayer
from fusedops.integrations.hf.symbolic import INPUT, Expression, Path, Question
from fusedops.integrations.hf.torch_operations import is_same_value

_WIDE = ("cast", INPUT, torch.float32)
_ITS_DTYPE = ("dtype", INPUT)
Place = tuple[str, str]  # ("attribute", path)


class NormExpression(NamedTuple):
    """A norm over the last dimension, or over those of ``shape``."""

    op: str  # "rms_norm" or "layer_norm"
    weight: Place | None = None
    bias: Place | None = None
    eps: float | Place | None = None  # ``None`` for torch's own
    weight_offset: float = 0.0  # as in ``rms_norm``
    rounding: str = "torch"  # as in ``rms_norm``
    shape: Place | int | None = None  # where ``normalized_shape`` is, or its only size
    wide: bool = True  # whether the code computes in float32
    narrowed: bool = False  # whether it returns the dtype of the input at last
    one_dtype: bool = False  # whether weight and input must have one


def norm_of(expression: Expression) -> NormExpression | None:
    """Return the norm that an expression is, or ``None``."""
    narrowed, content = _without_cast(expression)
    norm = _functional(content) or _formula(content)
    if norm is None or (norm.wide and not narrowed and norm.rounding == "torch"):
        return None  # in half precision its result would be float32
    return norm._replace(narrowed=narrowed)


def _without_cast(expression: Expression) -> tuple[bool, Expression]:
    match expression:
        case ("cast", content, dtype) if dtype == _ITS_DTYPE:
            return True, content
    return False, expression


def _functional(expression: Expression) -> NormExpression | None:
    match expression:
        case ("layer_norm" | "rms_norm" as op, source, *options) if source in (INPUT, _WIDE):
            given: dict[str, Any] = dict(options)
        case _:
            return None
    shape = given.get("normalized_shape")
    match shape:
        case ("attribute", str()):
            pass
        case (("size", _, -1),) if shape[0][1] == INPUT:
            shape = None
        case (int() | ("attribute", str()),):
            shape = shape[0]
        case _:
            return None
    places = given.get("weight"), given.get("bias")
    if not all(place is None or _is_place(place) for place in places):
        return None
    eps = given.get("eps", 1e-5 if op == "layer_norm" else None)
    if not (eps is None or _is_number(eps)):
        return None
    return NormExpression(op, *places, eps=eps, shape=shape, wide=source == _WIDE)


def _formula(expression: Expression) -> NormExpression | None:
    for weight, normed in factors(expression):
        place_and_offset = _weight(weight)
        narrowed, content = _without_cast(normed)
        core = _normalised(content)
        if core is None or place_and_offset is None:
            continue
        place, offset = place_and_offset
        if core.wide and not narrowed:
            return core._replace(weight=place, weight_offset=offset)
        if weight != place:  # a weight in float32 makes the product float32
            return None
        if not core.wide:
            return core._replace(weight=place)
        return core._replace(weight=place, rounding="hf") if core.op == "rms_norm" else None
    return _normalised(expression)


def factors(expression: Expression) -> list[tuple[Expression, Expression]]:
    """Return the two factors that an expression is the product of, in both orders; else none."""
    match expression:
        case ("mul", first, second):
            return [(first, second), (second, first)]
    return []


def _weight(expression: Expression) -> tuple[Place, float] | None:
    """Return where a weight is, and what is added to it."""
    match expression:
        case ("add", weight, int(offset) | float(offset)):
            place = _weight(weight)
            wide = weight[0] == "cast"  # a sum in half precision is rounded
            return (place[0], float(offset)) if place is not None and wide else None
        case ("add", int() | float() as offset, weight):
            return _weight(("add", weight, offset))
        case ("cast", ("attribute", _) as place, torch.float32):
            return place, 0.0
        case ("attribute", str()):
            return expression, 0.0
    return None


def _normalised(expression: Expression) -> NormExpression | None:
    """Return the norm, without a weight, that ``centred * rsqrt(mean(centred ** 2) + eps)`` is."""
    for factor, row in factors(expression):
        match factor:
            case ("rsqrt", ("add", ("mean", ("square", squared)), eps)) if _is_number(eps):
                for source in (_WIDE, INPUT):
                    wide = source == _WIDE
                    if squared == source and row in (source, INPUT):
                        return NormExpression("rms_norm", eps=eps, wide=wide)
                    centred = ("sub", source, ("mean", source))
                    if squared == centred and row == centred:
                        return NormExpression("layer_norm", eps=eps, wide=wide)
    return None


def _is_place(expression: Expression) -> bool:
    return isinstance(expression, tuple) and len(expression) == 2 and expression[0] == "attribute"


def _is_number(expression: Expression) -> bool:
    return isinstance(expression, float) or _is_place(expression)


def steps_of(expression: Expression) -> tuple[Step, ...]:
    """Return the steps of a feed-forward layer that an expression is: a gate, or two or more.

    They run one after the other; there are none where it is something else.
    """
    steps: list[Step] = []
    has_sum = False
    while expression != INPUT:
        step, source = step_of(expression)
        if step is None and not has_sum:
            step, source = _sum_of(expression)
            has_sum = step is not None
        if step is None:
            step, source = _gate_of(expression), INPUT
        if step is None:
            return ()
        steps.append(step)
        expression = source
    enough = len(steps) - has_sum > 1 or any(isinstance(step, GateStep) for step in steps)
    return tuple(reversed(steps)) if enough else ()


def _sum_of(expression: Expression) -> tuple[Add | None, Expression]:
    """Return the argument that is added at the end of an expression, and what it is added to."""
    match expression:
        case ("add", content, ("input", *names)) | ("add", ("input", *names), content):
            return Add(next(iter(names), None)), content
    return None, expression


def _gate_of(expression: Expression) -> GateStep | None:
    for gate, up in factors(expression):
        activation, projected = activation_of(gate)
        if activation is None:
            continue
        scales: tuple[Scale, ...] = ()
        step, source = step_of(projected)
        if isinstance(step, Scale):
            scales, projected = (step,), source
        limit = None
        match (projected, up):
            case (
                ("clamp", ("call", *_) as product, ("max", limit)),
                ("clamp", ("call", *_) as factor, ("min", ("neg", lowest)), ("max", highest)),
            ) if lowest == highest == limit and _is_number(limit):
                projected, up = product, factor
        match (projected, up):
            case (("call", first, argument), ("call", second, other)):
                if argument == other == INPUT and first != second:
                    return GateStep((first, second), activation, scales=scales, limit=limit)
            case (("part", chunk, half), ("part", other, rest)):
                match chunk:
                    case ("chunk", ("call", packed, argument), 2, _) if (
                        chunk == other and half + rest == 1 and argument == INPUT and not scales
                    ):
                        return GateStep((packed,), activation, half)
    return None


def step_of(expression: Expression) -> tuple[Step | None, Expression]:
    """Return the step that an expression ends with, and what it is applied to."""
    match expression:
        case ("dropout", source, ("p", p), ("training", ("attribute", "training")), *rest):
            if _in_place(rest) is False and _is_number(p):
                return DropoutFunction(p), source
            return None, expression
    activation, source = activation_of(expression)
    if activation is None:
        for scaled, factor in factors(expression):
            if _is_number(factor):
                return Scale(factor), scaled
    return activation, source


def activation_of(expression: Expression) -> tuple[str | Function | None, Expression]:
    """Return the child or function that an expression ends with, and what it is applied to."""
    match expression:
        case ("call", str(child), source):
            return child, source
        case ("silu" | "relu" as name, source, *rest) if _in_place(rest) is False:
            return Function(name), source
        case ("gelu", source):
            return Function("gelu"), source
        case ("gelu", source, ("approximate", approximate)):
            return Function("gelu", approximate), source
        case ("square", ("relu", source, *rest)) if _in_place(rest) is False:
            return Function("relu2"), source
        case ("mul", source, ("sigmoid", bounded)) | ("mul", ("sigmoid", bounded), source):
            if is_same_value(source, bounded):
                return Function("silu"), source
            for scaled, slope in factors(bounded):
                if is_same_value(source, scaled) and _is_number(slope):
                    return Function("swish", slope), source
    return None, expression


def _in_place(options: list[Any]) -> bool:
    return options not in ([], [("inplace", False)])


def linear_layer_of(paths: tuple[Path, ...]) -> LinearLayer | None:
    """Return the linear layer that a class with a weight and perhaps a bias is by its code."""
    results = {path.answers: path.result for path in paths}
    weight, bias = ("attribute", "weight"), ("attribute", "bias")
    if results == {(): ("linear", INPUT, ("weight", weight), ("bias", bias))}:
        return LinearLayer()
    product = ("matmul", INPUT, ("attribute", "weight.T"))
    has_bias = Question("bias", "is_not", None)
    if results == {((has_bias, True),): ("add", product, bias), ((has_bias, False),): product}:
        return LinearLayer(rounds_twice=True)
    return None


class ClampedGate(NamedTuple):
    """``(clamp(up, -limit, limit) + 1) * swish(min(gate, limit))``, the gate of GPT-OSS."""

    slope: Any  # that of ``swish``, or where it is
    limit: Any  # the bound, or where it is
    interleaved: bool  # whether gate and up are columns next to one another, else halves


def clamped_gate_of(expression: Expression) -> ClampedGate | None:
    """Return the clamped gate that an expression of gate and up in one tensor is, or ``None``."""
    for up, gate in factors(expression):
        activation, bounded = activation_of(gate)
        match up, bounded:
            case (
                ("add", ("clamp", factor, ("min", ("neg", lowest)), ("max", highest)), 1 | 1.0),
                ("clamp", gate, ("max", limit)),
            ):
                pass
            case _:
                continue
        if not isinstance(activation, Function) or activation.name != "swish":
            continue
        halves = ("chunk", INPUT, 2, ("dim", -1))
        for interleaved, parts in (
            (True, (("strided", INPUT, 0, 2), ("strided", INPUT, 1, 2))),
            (False, (("part", halves, 0), ("part", halves, 1))),
        ):
            if (gate, factor) == parts and lowest == highest == limit and _is_number(limit):
                return ClampedGate(activation.parameter, limit, interleaved)
    return None
