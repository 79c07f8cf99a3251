"""Tensor descriptors: tiles that one thread asks the copy engine of a GPU for (TMA).

On sm_90 and sm_100 an operand of a matrix product can be fetched by its descriptor, base and sizes
and strides, instead of by a pointer a thread: no addresses, no masks (what lies outside reads as
zero), no registers for either. It requires base and strides that are multiples of 16 bytes, and
contiguous elements; for tensors of another layout the kernels load by pointers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedops._core import env
from fusedops._core.capability import compute_capability

_ALIGNMENT = 16  # bytes
_LARGEST = 2**31 - 1  # positions are 32-bit


@functools.cache
def available(device: torch.device) -> bool:
    """Return whether a GPU has the copy engine; Triton's interpreter stands for one that has."""
    if device.type != "cuda":
        return env.triton_interpreted()
    capability = compute_capability(device)
    return capability is not None and capability[0] in (9, 10)


def describable(*tensors: torch.Tensor) -> bool:
    """Return whether descriptors of these tensors can be made, which must be on one device."""
    return available(tensors[0].device) and all(map(_fits, tensors))


def _fits(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    return (
        tensor.numel() > 0
        and size <= 2  # the tiles of float32 are of another kernel
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(stride > 0 and stride * size % _ALIGNMENT == 0 for stride in tensor.stride()[:-1])
        and max(tensor.shape) <= _LARGEST
    )


def describe(tensor: torch.Tensor, block: Sequence[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))
