"""A call of an op that launches configurations of the static report, not yet made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fusedops.specs.make import TensorFactory as New


@dataclasses.dataclass(frozen=True)
class HotCall:
    """A call that launches configurations of the static report."""

    op: str  # that of the kernel file, or one that shares its kernels
    name: str
    # Returns the positional arguments, or a pair of these and a dict of keyword arguments
    make: Callable[[New], Any]
    random: bool = False  # whether it draws numbers (dropout)
    # Keyword argument that a gradient is added to -> position of what it is the gradient of
    buffers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    float32: bool = False  # whether the report has its configuration in float32; else in half


def in_float32(*calls: HotCall) -> list[HotCall]:
    """Return the calls whose configurations the report has in float32 too."""
    return [dataclasses.replace(call, float32=True) for call in calls]
