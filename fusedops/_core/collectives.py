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


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, *, group: Any = None, async_op: bool = False
) -> Any:
    """Gather the ranks' tensors, all of one shape, as ``torch.distributed.all_gather_into_tensor``.

    Torch 2.13 has it by this name and warns of the old one; 2.11 has the old one only.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, *, group: Any = None, async_op: bool = False
) -> Any:
    """Sum and scatter the ranks' tensors, as ``torch.distributed.reduce_scatter_tensor``.

    Torch 2.13 has it by this name and warns of the old one; 2.11 has the old one only.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, group=group, async_op=async_op)
