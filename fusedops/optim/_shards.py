"""DTensors in an optimizer: the local shard, its place in the full tensor, sums over all shards.

``torch.distributed.tensor`` takes a second to import. This module imports it only for a DTensor,
which exists only where it has been imported already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fusedops._core.checks import UnsupportedError
from fusedops._core.device_tensors import device_tensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is here, without a graph; a plain tensor is all of it."""
    part = tensor
    if is_dtensor(part):
        part = part._local_tensor
        if hasattr(part, "trigger_wait"):  # the result of a collective that may still run
            part = part.trigger_wait()
    # Of the local tensor itself: a DTensor's detach gives one whose version counter is its own.
    return part.detach() if part.requires_grad else part


def stored(tensor: Any) -> Any:
    """Return the object that holds the part of a tensor that is here, for as long as it does."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def version(tensor: Any) -> int:
    """Return how often a tensor was written to; of a DTensor by itself or by its local part."""
    count = 0 if tensor.is_inference() else int(tensor._version)
    return count + int(tensor._local_tensor._version) if is_dtensor(tensor) else count


def trace(tensor: Any) -> tuple[Any, ...]:
    """Return what a write to a tensor changes: its version, its memory and its place there.

    In-place operations on ``tensor.data`` change none of them. No memory is kept alive.
    """
    part = local(tensor)
    return version(tensor), part.data_ptr(), StorageWeakRef(part.untyped_storage())


def count_writes(tensors: Iterable[Any]) -> None:
    """Increase the versions of tensors that were written, and of their parts that are here."""
    written = list(tensors)
    written += [stored(tensor) for tensor in written if is_dtensor(tensor)]
    torch.autograd.graph.increment_version(written)


def placed_like(grad: Any, param: Any) -> Any:
    """Return a gradient cut as its parameter is: a sum that is pending is made."""
    if is_dtensor(param) and placed_otherwise(grad, param):
        return grad.redistribute(placements=param.placements)
    return grad


def summed(tensor: Any) -> Any:
    """Return a tensor of which no sum over processes is pending."""
    if not is_dtensor(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [
        Replicate() if placement.is_partial() else placement for placement in tensor.placements
    ]
    return tensor.redistribute(placements=placements)


def place(tensor: Any, name: str) -> tuple[int, int, int]:
    """Return ``(base, run, pitch)``: local element i is base + i // run * pitch + i % run.

    That number counts the elements of the full tensor in row-major order.

    Raises:
        UnsupportedError: the local part is no regular pattern of runs.
    """
    if not is_dtensor(tensor):
        return 0, max(1, tensor.numel()), max(1, tensor.numel())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    full_shape = tuple(tensor.shape)
    part, offset = compute_local_shape_and_global_offset(
        full_shape, tensor.device_mesh, tensor.placements
    )
    if math.prod(part) == 0:
        return 0, 1, 1
    return _pattern(full_shape, part, offset, name)


def _pattern(
    full_shape: Sequence[int], part: Sequence[int], offset: Sequence[int], name: str
) -> tuple[int, int, int]:
    strides = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    base = sum(start * stride for start, stride in zip(offset, strides, strict=True))
    cut = [dim for dim in range(len(full_shape)) if part[dim] != full_shape[dim]]
    if not cut:
        return base, max(1, math.prod(full_shape)), max(1, math.prod(full_shape))
    last = cut[-1]
    # The runs lie evenly spaced if no dim between the outermost of several rows and `last` is cut.
    outer = [dim for dim in range(last) if part[dim] > 1]
    if len(outer) > 1 and any(outer[0] < dim < last for dim in cut):
        raise UnsupportedError(
            f"AdamW: stochastic rounding cannot number the elements of parameter {name}, of which "
            f"this process holds {tuple(part)} of {tuple(full_shape)}: that is no even pattern of "
            "runs. Shard at most two dimensions, or keep float32 states"
        )
    spacing = strides[outer[-1]] if outer else strides[last]
    return base, math.prod(part[last:]), spacing


def sum_over_shards(sums: torch.Tensor, tensors: Sequence[Any]) -> torch.Tensor:
    """Add to each entry of ``sums`` those of the processes that hold other parts of its tensor.

    No sums of the tensors are pending. Every process of a mesh gets the same bits.
    """
    layouts: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            placements = enumerate(tensor.placements)
            dims = tuple(dim for dim, placement in placements if not placement.is_replicate())
            if dims:
                layouts.setdefault((tensor.device_mesh, dims), []).append(index)
    for (mesh, dims), members in layouts.items():
        # Indices that are a list would be copied to a GPU, for which the host waits.
        entries = device_tensor(members, torch.int64, sums.device)
        part = sums.index_select(0, entries).to(mesh.device_type)
        for dim in dims:
            torch.distributed.all_reduce(part, group=mesh.get_group(dim))
        sums.index_copy_(0, entries, part.to(sums.device))
    return sums


def is_final(param: torch.Tensor) -> bool:
    """Whether a gradient is what it will be in the step as soon as it was accumulated.

    FSDP2 sets those of DTensors when they are reduced. DDP reduces those of plain parameters later.
    """
    if is_dtensor(param):
        return True
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def placed_otherwise(grad: Any, param: Any) -> bool:
    return is_dtensor(grad) and grad.placements != param.placements
