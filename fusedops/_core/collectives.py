"""Collectives below ``fusedops.parallel``: what torch's versions name differently, what ops make.

Of the former this is the place that chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Called for what ops communicate: kind, label, bytes that this rank sends, ranks. The logs of
# ``fusedops.parallel.comm.collectives``, which is above the ops, while one is open.
listeners: list[Callable[[str, str, int, int], None]] = []


def all_reduce(tensor: torch.Tensor, group: Any, *, label: str) -> torch.Tensor:
    """Return the sum over the ranks: a functional collective, which compilers take into a graph."""
    from torch.distributed import _functional_collectives as functional

    ranks = dist.get_world_size(group)
    for listener in listeners:
        sent = 2 * tensor.numel() * tensor.element_size() * (ranks - 1) // ranks
        listener("all_reduce", label, sent, ranks)
    return functional.all_reduce(tensor, "sum", group)


# As ``torch.distributed.all_gather_into_tensor`` and ``reduce_scatter_tensor``. Torch 2.13 has them
# by these names and warns of the old ones; 2.11 has the old ones only.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
