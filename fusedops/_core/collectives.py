"""The collectives that torch's versions name differently: this is the place that chooses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, *, group: Any = None, async_op: bool = False
) -> Any:
    """Gather the ranks' tensors, all of one shape, behind one another in one tensor.

    Torch 2.13 has it by this name and warns of the old one; 2.11 has the old one only.

    Args:
        output: receives them.
        input: this rank's.
        group: the process group.
        async_op: whether to return before it is done.

    Returns:
        As ``torch.distributed.all_gather_into_tensor``: a handle with ``async_op``.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)
