"""Activations in a graph: torch's, and those that are written as a formula.

A formula is known by its values: the nodes that compute it run in float64 on a few numbers, and the
results are compared with those of each activation. So it does not matter how it is written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fusedops._core.activation import ACTIVATIONS
from fusedops.integrations.graph.reader import GraphReader, value_of

_NAMES = ("gelu", "gelu_tanh", "fast_gelu", "silu", "relu2")
_ELEMENTWISE = {
    *("tanh", "erf", "sigmoid", "exp", "square", "pow", "relu", "neg", "cast", "rsqrt", "sqrt"),
    *("add", "sub", "mul", "div"),
}
_LAST = {"mul", "div", "square", "pow", "cast"}  # what a formula may end with
_SATURATING = {"tanh", "erf", "sigmoid", "exp", "relu"}
_MOST_NODES = 16
# Constants are rounded: transformers writes sqrt(2 / pi) with ten digits.
_TOLERANCE = 1e-9


def activation_of(reader: GraphReader, node: Any) -> tuple[str | None, Any]:
    """Return the name of the activation that a node is, or ``None``, and what it is applied to."""
    match reader.expression(node):
        case ("silu" | "relu" as name, fx.Node() as source, *options):
            return (None if ("inplace", True) in options else name), source
        case ("gelu", fx.Node() as source, *options):
            return ("gelu_tanh" if ("approximate", "tanh") in options else "gelu"), source
        case (str() as name, *_) if name in _LAST:
            return _formula(reader, node)
    return None, node


def _formula(reader: GraphReader, root: fx.Node) -> tuple[str | None, Any]:
    members = _elementwise(reader, root)
    if not any(reader.expression(node)[0] in _SATURATING for node in members):
        return None, root
    result = value_of(root)
    sources = {part: None for node in members for part in _tensors(reader.expression(node))}
    for source in sources:
        value = value_of(source)
        if value is None or result is None or value.dtype != result.dtype:
            continue
        if value.shape == result.shape:
            values = _values(reader, root, source)
            for name, known in _known()[1].items():
                if values is not None and torch.allclose(values, known, _TOLERANCE, _TOLERANCE):
                    return name, source
    return None, root


def _elementwise(reader: GraphReader, root: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node is made of by operations on single elements, itself first."""
    members: dict[fx.Node, None] = {}
    waiting = [root]
    while waiting and len(members) < _MOST_NODES:
        node = waiting.pop(0)
        content = reader.expression(node)
        if node in members or not isinstance(content, tuple) or content[0] not in _ELEMENTWISE:
            continue
        members[node] = None
        waiting += _tensors(content)
    return list(members)


def _tensors(expression: Any) -> list[fx.Node]:
    return [part for part in expression[1:] if isinstance(part, fx.Node)]


@functools.cache
def _known() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return some numbers, and what each activation is of them."""
    points = torch.linspace(-5.0, 5.0, 41, dtype=torch.float64) + 0.0123
    return points, {name: ACTIVATIONS[name](points) for name in _NAMES}


def _values(reader: GraphReader, node: Any, source: fx.Node) -> torch.Tensor | None:
    """Return what a node is where a source has some values, or ``None``: it needs another one."""
    results: dict[fx.Node, Any] = {source: _known()[0]}

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        node = reader.source(node)
        if node not in results:
            results[node] = _apply(*map(value, reader.expression(node)))
        return results[node]

    try:
        values = value(node)
    except (TypeError, KeyError, RecursionError):
        return None
    return values if isinstance(values, torch.Tensor) else None


def _apply(name: Any, *arguments: Any) -> Any:
    if name == "cast":
        return arguments[0]
    function = {"div": torch.true_divide}.get(name) or getattr(torch, name)
    tensors = [
        torch.tensor(argument, dtype=torch.float64)
        if isinstance(argument, int | float)
        else argument
        for argument in arguments
    ]
    return function(*tensors)
