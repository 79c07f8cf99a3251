"""Sizes during tracing: integers, symbols, or zero-dim tensors.

``torch.compile`` and ``torch.export`` have symbols for dynamic sizes. A branch on a symbol adds a
guard to the graph, and an exported program rejects inputs that violate it: a choice that only
affects speed must not branch on a symbol. ``torch.jit.trace`` has tensors for all sizes, which no
op accepts as integers; an integer argument of an op becomes a constant of the traced graph.
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
