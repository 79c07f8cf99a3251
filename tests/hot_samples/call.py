"""A call of an op that launches configurations of the static report, not yet made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusedops.specs.make import randn


@dataclasses.dataclass(frozen=True)
class New:
    """Makes random tensors: ``randn`` on a device, in the dtype of a call's data by default."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int, **options: Any) -> torch.Tensor:
        return randn(*shape, **{"device": self.device, "dtype": self.dtype, **options})


@dataclasses.dataclass(frozen=True)
class HotCall:
    """A call that launches configurations of the static report.

    Attributes:
        op: the op that is called: that of the kernel file, or one that shares its kernels.
        name: what tells it from others.
        make: returns its positional arguments, or a pair of these and a dict of keyword arguments.
        random: whether it draws numbers (dropout).
        buffers: keyword argument that a gradient is added to -> position of the argument that it
            is the gradient of.
        float32: whether the report has its configuration in float32; else in half precision.
    """

    op: str
    name: str
    make: Callable[[New], Any]
    random: bool = False
    buffers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    float32: bool = False


def in_float32(*calls: HotCall) -> list[HotCall]:
    """Return the calls whose configurations the report has in float32 too."""
    return [dataclasses.replace(call, float32=True) for call in calls]
