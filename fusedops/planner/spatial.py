"""Cuts of a convolutional model over devices: bytes and seconds of a step, before it runs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.planner.device import Device
from fusedops.planner.spatial_trace import SpatialRank, trace

_OP = "spatial_plan"
DTYPES = (torch.float32, torch.bfloat16)
# Parameters, their gradients and AdamW's two moments.
_PARAMETER_COPIES = 4
_ALL_RANKS = 4  # of an axis, of which all are traced


@dataclass(frozen=True, kw_only=True)
class SpatialPlan:
    """A cut of a model, by its busiest ranks.

    Attributes:
        cut: devices along each dim behind the channels.
        input: bytes of the complete input.
        parameters: bytes of the parameters, which every device has.
        ranks: those that were traced: all of an axis of up to four, of a longer one the first two,
            one in the middle and the last.
        single: the same step on one device, whatever its memory.
    """

    cut: tuple[int, ...]
    input: int
    parameters: int
    ranks: tuple[SpatialRank, ...]
    single: SpatialRank

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(self.cut)

    def most(self, name: str) -> Any:
        """Return the largest value of an attribute of ``SpatialRank``."""
        return max(getattr(rank, name) for rank in self.ranks)

    @property
    def memory(self) -> int:
        """Bytes on the fullest device: parameters, gradients, AdamW's moments, activations."""
        activations = max(max(rank.saved, rank.input) + rank.working for rank in self.ranks)
        return _PARAMETER_COPIES * self.parameters + activations

    @property
    def seconds(self) -> float:
        """The time of the slowest rank."""
        return float(self.most("seconds"))

    @property
    def efficiency(self) -> float:
        """The time of one device by that of all devices together: 1 is a perfect speed-up."""
        return self.single.seconds / (self.devices * self.seconds)


def cuts_of(devices: int, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all ways to lay devices along the dims behind the channels, one row each at least."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    choices = [[size for size in sizes if size <= rows] for rows in shape[2:]]
    return [cut for cut in itertools.product(*choices) if math.prod(cut) == devices]


def spatial_plan(
    module: nn.Module,
    input_shape: Sequence[int],
    cut: Sequence[int],
    device: Device,
    *,
    dtype: torch.dtype = torch.float32,
    single: SpatialRank | None = None,
) -> SpatialPlan:
    """Return bytes and seconds of a step of a module whose input is cut over devices.

    Args:
        module: any module that ``spatial.shard`` takes, on any device; it is not changed.
        input_shape: of the complete input, ``[B, C, ...]``.
        cut: devices along each dim behind the channels.
        device: each of the devices.
        dtype: of parameters and activations, float32 or bfloat16.
        single: the step on one device (``SpatialPlan.single``), where it is known already.

    Raises:
        ValueError: the sizes do not fit together, or not to the module.
        UnsupportedError: a layer cannot be cut.

    Example:
        >>> from fusedops.planner import load_device
        >>> conv = nn.Conv2d(4, 8, 3, padding=1)
        >>> plan = spatial_plan(conv, (1, 4, 30000, 30000), (4, 4), load_device("h100"))
        >>> plan.input, plan.most("halo_forward")  # rows of 7500 and columns of 7502 on two sides
        (14400000000, 480064)
    """
    checks.module(_OP, module)
    shape, cut = tuple(input_shape), tuple(cut)
    for name, sizes in (("input_shape", shape), ("cut", cut)):
        for size in sizes:
            checks.integer(_OP, f"a size of {name}", size, least=1)
    if not 3 <= len(shape) <= 5:
        checks.fail(_OP, "input_shape", "batch, channels and one to three dims", shape)
    if len(cut) != len(shape) - 2:
        checks.fail(_OP, "cut", f"{len(shape) - 2} numbers, one for each spatial dim", cut)
    for rows, number in zip(shape[2:], cut, strict=True):
        if number > rows:
            checks.fail(_OP, "cut", f"at most the {rows} rows of its dim", number)
    if dtype not in DTYPES:
        checks.fail(_OP, "dtype", "torch.float32 or torch.bfloat16", str(dtype))
    planned = _on_meta(module, dtype)
    try:
        if single is None:
            single = trace(planned, shape, (0,) * len(cut), (1,) * len(cut), device, dtype)
        places = itertools.product(*map(_places, cut))
        ranks = tuple(trace(planned, shape, place, cut, device, dtype) for place in places)
    except (RuntimeError, TypeError, IndexError, AssertionError) as error:
        if isinstance(error, checks.UnsupportedError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{_OP}: the module does not take {list(shape)}: {reason}") from error
    parameters = sum(p.numel() * p.element_size() for p in planned.parameters())
    size = math.prod(shape) * dtype.itemsize
    return SpatialPlan(cut=cut, input=size, parameters=parameters, ranks=ranks, single=single)


def _on_meta(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a module whose tensors have no data."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, dtype=kind, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)


def _places(ranks: int) -> list[int]:
    if ranks <= _ALL_RANKS:
        return list(range(ranks))
    return [0, 1, ranks // 2, ranks - 1]
