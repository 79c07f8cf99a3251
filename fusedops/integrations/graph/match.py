"""A part of a graph that one call of a fused op computes, and its replacement."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map

from fusedops.integrations.graph.reader import GraphReader, value_of
from fusedops.integrations.hf.rules.rule import runs_here


class Match(NamedTuple):
    """A call that computes some nodes."""

    rewrite: str  # its name
    function: Callable[..., Any]  # returns a tuple if there is more than one root
    arguments: tuple[Any, ...]  # nodes, numbers, ``None``
    options: dict[str, Any]  # keywords
    # The nodes that its results take the place of. All between them and the arguments is the work
    # of the call
    roots: tuple[fx.Node, ...]


def apply(reader: GraphReader, match: Match) -> bool:
    """Put a call in the place of what it computes, if that has the same results for all users.

    Returns:
        Whether it is there. It is not where a value between is used elsewhere, where something is
        written to, where autocast or the need of gradients changes in between, and where the
        results would have another shape, dtype or layout.
    """
    values = (*match.arguments, *match.options.values())
    sources = [argument for argument in values if isinstance(argument, fx.Node)]
    nodes = reader.inner(match.roots, sources)
    if nodes is None or not set(match.roots) <= set(nodes) or not reader.in_one_region(nodes):
        return False
    if not reader.is_unchanged([*nodes, *sources]):
        return False
    position = reader.position(nodes, sources)
    if position is None or not reader.in_one_region([*nodes, position]):
        return False
    results = _results(reader, match)
    if results is None or not all(map(_can_replace, results, match.roots)):
        return False
    _insert(reader, match, results, position)
    for node in reversed(nodes):
        reader.graph.erase_node(node)
    return True


def _insert(
    reader: GraphReader, match: Match, results: tuple[torch.Tensor, ...], position: fx.Node
) -> None:
    graph = reader.graph
    with graph.inserting_before(position):
        call = graph.call_function(match.function, match.arguments, match.options)
        outputs = [call]
        if len(match.roots) > 1:
            outputs = [
                graph.call_function(operator.getitem, (call, index))
                for index in range(len(match.roots))
            ]
            call.meta["example_value"] = results
            reader.insert(call, position)
    for root, output, result in zip(match.roots, outputs, results, strict=True):
        output.meta = {**root.meta, "example_value": result}
        reader.insert(output, position)
        root.replace_all_uses_with(output)


def _results(reader: GraphReader, match: Match) -> tuple[torch.Tensor, ...] | None:
    """Return the fake results of a call, or ``None`` if it does not take these arguments."""
    root = match.roots[0]
    fake = value_of(root)
    if fake is None:
        return None

    def value(argument: Any) -> Any:
        return argument.meta["example_value"] if isinstance(argument, fx.Node) else argument

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake.fake_mode)
            for device, dtype, enabled, cache in reader.autocasts(root):
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            results = match.function(
                *tree_map(value, match.arguments), **tree_map(value, match.options)
            )
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        return None
    return results if isinstance(results, tuple) else (results,)


def _can_replace(result: Any, root: fx.Node) -> bool:
    """Return whether a result has what the users of a node need of its value."""
    value = value_of(root)
    return (
        isinstance(result, torch.Tensor)
        and value is not None
        and runs_here(value)
        and result.shape == value.shape
        and result.dtype == value.dtype
        and result.device == value.device
        and (result.stride() == value.stride() or _is_rearranged(root))
    )


def _is_rearranged(node: fx.Node) -> bool:
    """Return whether all users make a tensor of their own layout, as behind attention."""
    return all(
        user.target in ("contiguous", "reshape", "flatten")
        or (user.target in ("transpose", "permute") and _is_rearranged(user))
        for user in node.users
    )
