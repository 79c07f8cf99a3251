"""Rotary position embedding in a graph, of pairs of halves or of neighbours."""

from __future__ import annotations

import operator
import types
from typing import Any

import torch
from torch import fx

from fusedops.integrations.graph.match import Match
from fusedops.integrations.graph.reader import GraphReader, value_of
from fusedops.ops.rotary_embedding import rotary_embedding


def rotary_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return the rotation of a query and a key by the same angles, or ``None``.

    The root is that of the second one; the first is searched among the users of the cosines.
    """
    second = _rotation(reader, root)
    if second is None:
        return None
    source, cos, sin = second
    for product in cos.users:
        for candidate in product.users:
            if candidate is root or not reader.precedes(candidate, root):
                continue
            first = _rotation(reader, candidate)
            if first is not None and first[1:] == (cos, sin) and first[0] is not source:
                arguments = (first[0], source, cos, sin)
                return Match(
                    "rotary_embedding", rotate_with_tables, arguments, {}, (candidate, root)
                )
    return None


def rotate_with_tables(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate ``[batch, num_heads, seq_len, head_dim]`` by tables of one head."""
    return rotary_embedding(query, key, cos.squeeze(1), sin.squeeze(1))


def _rotation(reader: GraphReader, root: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the input, cosines and sines of a rotation, or ``None``."""
    match reader.expression(root):
        case ("add", fx.Node() as plain, fx.Node() as turned):
            pass
        case _:
            return None
    for first, second in ((plain, turned), (turned, plain)):
        match reader.expression(first), reader.expression(second):
            case (("mul", fx.Node() as x, fx.Node() as cos), ("mul", fx.Node() as half, sin)):
                if _is_turned(reader, half, x) and _are_tables(x, cos, sin):
                    return x, cos, sin
    return None


def _is_turned(reader: GraphReader, node: fx.Node, x: fx.Node) -> bool:
    """Return whether a node is the second half of ``x``, negated, and the first."""
    value = value_of(x)
    dim = node.kwargs.get("dim", node.args[1:] and node.args[1])
    if node.target is not torch.cat or dim not in (-1, 3):
        return False
    match node.args[0]:
        case [fx.Node() as negated, fx.Node() as first]:
            pass
        case _:
            return False
    match reader.expression(negated):
        case ("neg", fx.Node() as second) if value is not None and value.dim() == 4:
            half = value.shape[-1] // 2
        case _:
            return False
    return _columns(first, x) == (0, half) and _columns(second, x) == (half, 2 * half)


def _columns(node: fx.Node, x: fx.Node) -> tuple[Any, Any] | None:
    """Return first and last column of ``x`` that a node is, or ``None``."""
    value = value_of(x)
    if node.target is not operator.getitem or node.args[0] is not x or value is None:
        return None
    match node.args[1]:
        case [types.EllipsisType(), slice(start=start, stop=stop, step=None)]:
            return start or 0, value.shape[-1] if stop is None else stop
    return None


def _are_tables(x: fx.Node, *tables: Any) -> bool:
    """Return whether some nodes are tables that all heads share, without gradients."""
    value = value_of(x)
    for table in map(value_of, tables):
        if table is None or value is None or table.dim() != 4 or table.shape[1] != 1:
            return False
        if table.requires_grad or table.shape[-1] != value.shape[-1]:
            return False
    return True
