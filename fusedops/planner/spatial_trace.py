"""One step of one rank of a cut model on the meta device: its bytes, and its seconds.

The module runs as ``fusedops.parallel.spatial`` runs it, with a process group that has a size and
no ranks; communications are logged and not sent. Every function takes the longer of the times of
its products and of the bytes that it reads and writes. A communication travels from its start to
its wait in the program while the rank computes; only what is left then adds to the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial import SpatialTensor
from fusedops.parallel.spatial.partition import Axis, evenly
from fusedops.parallel.spatial.tensor import wrap
from fusedops.planner.device import Device
from fusedops.planner.step_time import KERNEL_SECONDS

Sizes = tuple[int, ...]
_POINT_TO_POINT = "send_receive"


@dataclass(frozen=True, kw_only=True)
class SpatialRank:
    """A step of one rank: forward and backward.

    Attributes:
        place: of the rank along each cut dim.
        input: bytes of its part of the input.
        saved: bytes of the distinct tensors that the forward keeps for the backward, its input
            among them; parameters not.
        working: bytes of the inputs and outputs of the largest function.
        halo_forward: bytes that it sends point to point in the forward.
        halo_backward: those of the backward.
        reduced: bytes of all other communications: statistics, and gradients of parameters.
        compute_seconds: in which it computes.
        halo_seconds: in which its point-to-point messages travel.
        exposed_seconds: in which it waits for communications of all kinds.
        flops: floating-point operations of its products.
    """

    place: tuple[int, ...]
    input: int
    saved: int
    working: int
    halo_forward: int
    halo_backward: int
    reduced: int
    compute_seconds: float
    halo_seconds: float
    exposed_seconds: float
    flops: int

    @property
    def seconds(self) -> float:
        """The time of a step, without the optimizer."""
        return self.compute_seconds + self.exposed_seconds


@dataclass(frozen=True)
class _PlannedGroup:
    """What spatial parallelism asks a process group for."""

    group_name: str
    place: int
    ranks: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.ranks


class _Clock(TorchDispatchMode):
    """Adds the seconds of functions, and of communications from the log."""

    def __init__(self, device: Device, dtype: torch.dtype, cut: tuple[int, ...], log: Any) -> None:
        super().__init__()
        self._device, self._log, self._read = device, log, 0
        self._peak = device.peak_of(str(dtype).removeprefix("torch.")) * device.efficiency.products
        self._cut = cut
        self._arrivals: dict[int, float] = {}
        self.now = self.exposed = self.halo = 0.0
        self.working = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SpatialTensor) for kind in types):
            return NotImplemented  # it calls the function on its part
        self.read_log()
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        moved = sum({id(x): x.numel() * x.element_size() for x in tensors}.values())
        self.working = max(self.working, moved)
        flops = 0
        if func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        self.flops += flops
        self.now += max(flops / self._peak, moved / self._device.elementwise_rate) + KERNEL_SECONDS
        return out

    def read_log(self) -> None:
        """Start and end what was logged since the last call."""
        for event in self._log.events[self._read :]:
            if event.kind == collectives.COMPUTE:
                continue
            if event.phase == "start":
                seconds = self._travel(event)
                self._arrivals[event.number] = self.now + seconds
                self.halo += seconds if event.kind == _POINT_TO_POINT else 0.0
                continue
            left = max(0.0, self._arrivals.pop(event.number) - self.now)
            self.now, self.exposed = self.now + left, self.exposed + left
        self._read = len(self._log.events)

    def _travel(self, event: collectives.Event) -> float:
        """Return the seconds of a communication."""
        links, usual, dim = self._device.links, self._device.efficiency, int(event.group)
        apart = math.prod(self._cut[dim + 1 :])  # the ranks of the last dim are neighbours
        rate = self._device.collective_rate(self._cut[dim], apart)
        if event.kind == _POINT_TO_POINT and self._cut[dim] * apart > links.devices_per_node:
            rate = links.network * usual.point_to_point  # of the rank's own network link
        return usual.collective_seconds + event.bytes / rate


def trace(
    module: nn.Module, shape: Sizes, place: Sizes, cut: Sizes, device: Device, dtype: torch.dtype
) -> SpatialRank:
    """Return what a rank does in a step of a module on the meta device.

    ``place`` is that of the rank along each dim behind the channels, ``cut`` the ranks along each,
    ``shape`` that of the complete input, ``[B, C, ...]``.
    """
    x = _part(shape, place, cut, dtype)
    local: Any = getattr(x, "_local", x)
    owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = getattr(tensor, "_local", tensor).untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage
        return tensor

    with collectives.recorded() as log, _Clock(device, dtype, cut, log) as clock:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(x)
        forward = log.bytes(_POINT_TO_POINT)
        kept = sum(storage.nbytes() for storage in saved.values())
        saved.clear()
        results = [leaf for leaf in tree_leaves(output) if getattr(leaf, "requires_grad", False)]
        torch.autograd.backward(results, [torch.ones_like(leaf) for leaf in results])
        clock.read_log()
    module.zero_grad(set_to_none=True)
    halo = log.bytes(_POINT_TO_POINT)
    return SpatialRank(
        place=place,
        input=local.numel() * local.element_size(),
        saved=kept,
        working=clock.working,
        halo_forward=forward,
        halo_backward=halo - forward,
        reduced=log.bytes() - halo,
        compute_seconds=clock.now - clock.exposed,
        halo_seconds=clock.halo,
        exposed_seconds=clock.exposed,
        flops=clock.flops,
    )


def _part(shape: Sizes, place: Sizes, cut: Sizes, dtype: torch.dtype) -> Tensor:
    """Return the part of a rank, a plain tensor on one device."""
    axes: dict[int, Axis] = {}
    for index, (rank, ranks) in enumerate(zip(place, cut, strict=True)):
        if ranks > 1:
            group: Any = _PlannedGroup(str(index), rank, ranks)
            axes[index + 2] = Axis(str(index), group, rank, ranks)
    partition = evenly("spatial_plan", shape, axes)
    return wrap(torch.empty(partition.local_shape, dtype=dtype, device="meta"), partition)
