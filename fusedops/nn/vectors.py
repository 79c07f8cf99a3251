"""Which parameters of a model are vectors: biases, and the weights of norms."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from fusedops.nn.moe import MoE


def vector_patterns(model: nn.Module) -> tuple[str, ...]:
    """Return patterns that match the names of all vectors and of no other parameter.

    Weight decay usually leaves vectors out: ``AdamW(..., no_decay=vector_patterns(model))``. They
    have fewer than two dims; in the experts of an ``MoE``, whose first dim counts the experts,
    fewer than three. Vectors of the same name in several layers share a pattern.

    Args:
        model: any module, sharded or not.
    """
    experts = {
        parameter
        for module in model.modules()
        if isinstance(module, MoE)
        for parameter in module.experts.parameters()
    }
    dims = {name: p.dim() - (p in experts) for name, p in model.named_parameters()}
    matrices = [name for name, count in dims.items() if count >= 2]
    patterns = {name: pattern_of(name) for name, count in dims.items() if count < 2}
    shared = set(patterns.values())
    shared -= {pattern for pattern in shared if any(fnmatchcase(m, pattern) for m in matrices)}
    return tuple(sorted({p if p in shared else name for name, p in patterns.items()}))


def pattern_of(name: str) -> str:
    """Return a parameter's name with ``*`` for each part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
