"""Sizes while a graph is made: numbers, symbols, or tensors of no dimension.

``torch.compile`` and ``torch.export`` have symbols for the sizes that may change. What a branch
asks of a symbol becomes a condition under which alone the graph holds, and an exported program
refuses the inputs that do not meet it: a choice that is only about speed must not ask.
``torch.jit.trace`` has tensors for all sizes, which no op takes for numbers; what an op takes as an
argument becomes a constant of the traced graph.
"""

from __future__ import annotations

from typing import Any

import torch


def is_traced() -> bool:
    """Return whether ``torch.jit.trace`` runs."""
    return torch._C._get_tracing_state() is not None


def plain_size(size: Any) -> Any:
    """Return a size as a number while ``torch.jit.trace`` runs, and what was given otherwise."""
    if torch._C._get_tracing_state() is None or not isinstance(size, torch.Tensor):
        return size
    return int(size)


def plain_sizes(sizes: Any) -> Any:
    """Return a sequence of sizes as numbers while ``torch.jit.trace`` runs; else what was given."""
    if torch._C._get_tracing_state() is None or not isinstance(sizes, (tuple, list)):
        return sizes
    return [plain_size(size) for size in sizes]


def holds_for_all(condition: Any) -> bool:
    """Return whether a condition holds for all sizes that the graph is made for, which stay free.

    Where the sizes are numbers it is the condition itself; of one that holds for some sizes only it
    is ``False``.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)
