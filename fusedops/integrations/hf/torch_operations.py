"""Torch's functions and methods of tensors as expressions, each in one way (``symbolic.py``).

``x * x``, ``x.pow(2)`` and ``torch.square(x)`` are all ``("square", x)``. Arguments that are not
tensors follow as pairs of name and value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Expression = Any  # nested tuples, numbers, strings, dtypes and ``None``


class NoExpressionError(Exception):
    """The code does something that an expression cannot say."""


# Methods of tensors that have an expression, and functions of torch: each under one name.
METHODS = {
    *("add", "mul", "sub", "div", "pow", "square", "sqrt", "rsqrt", "mean", "var", "chunk", "size"),
    *("to", "float", "type", "type_as", "sigmoid", "tanh", "relu", "contiguous", "clamp"),
    "matmul",
}
NAMES: dict[Any, str] = {
    function: name
    for home, names in (
        (torch, METHODS | {"multiply", "divide", "rms_norm", "layer_norm", "true_divide"}),
        (F, {"silu", "gelu", "relu", "sigmoid", "tanh", "dropout", "layer_norm", "rms_norm"}),
        (F, {"linear"}),
    )
    for name in names
    if (function := getattr(home, name, None)) is not None
}
_SIGNATURES = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "dropout": ("input", "p", "training", "inplace"),
    "linear": ("input", "weight", "bias"),
    "clamp": ("input", "min", "max"),
    "gelu": ("input", "approximate"),
    "silu": ("input", "inplace"),
    "relu": ("input", "inplace"),
    "mean": ("input", "dim", "keepdim"),
    "chunk": ("input", "chunks", "dim"),
    "pow": ("input", "exponent"),
    "to": ("input", "dtype"),
    "type": ("input", "dtype"),
}
_SYNONYMS = {"multiply": "mul", "divide": "div", "true_divide": "div", "type": "to"}


def operation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expression:
    """Return an operation in the one way in which it is written here."""
    if name in _SIGNATURES:
        names = _SIGNATURES[name]
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or not given.keys() <= set(names):
            raise NoExpressionError
    elif kwargs:
        raise NoExpressionError
    name = _SYNONYMS.get(name, name)
    match name:
        case "float":
            return "cast", args[0], torch.float32
        case "type_as":
            return "cast", args[0], ("dtype", args[1])
        case "to":
            return "cast", given["input"], given["dtype"]
        case "pow" if given["exponent"] == 2:
            return "square", given["input"]
        case "pow" if given["exponent"] == -0.5:
            return "rsqrt", given["input"]
        case "pow":
            return name, given["input"], given["exponent"]
        case "mul" if is_same_value(*args):
            return "square", args[0]
        case "div":
            return _quotient(*args)
        case "mean":
            if given.get("keepdim") is not True or given.get("dim") not in (-1, (-1,)):
                raise NoExpressionError
            return "mean", given["input"]
        case "chunk":
            return "chunk", given["input"], given["chunks"], ("dim", given.get("dim", 0))
        case "clamp":
            bounds = [(key, given[key]) for key in ("min", "max") if given.get(key) is not None]
            return name, given["input"], *bounds
        case "layer_norm" | "rms_norm" | "dropout" | "gelu" | "silu" | "relu" | "linear":
            rest = [(key, given[key]) for key in _SIGNATURES[name][1:] if key in given]
            return name, given["input"], *rest
    return name, *args


def is_same_value(expression: Expression, other: Expression) -> bool:
    """Return whether two expressions have one value: what calls children may draw numbers twice."""
    return expression is other or (expression == other and not _may_draw(expression))


def _may_draw(expression: Expression) -> bool:
    if not isinstance(expression, tuple) or not expression:
        return False
    return expression[0] in ("call", "dropout") or any(map(_may_draw, expression))


def _quotient(above: Expression, below: Expression) -> Expression:
    match below:
        case ("sqrt", root):
            inverse = ("rsqrt", root)
            return inverse if above == 1 else ("mul", above, inverse)
    return "div", above, below
