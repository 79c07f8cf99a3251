"""Bytes and seconds of moving a tensor on a mesh, and of computing a step on a rank.

Bytes are those that a rank sends, for rings: an all-reduce of B bytes on n ranks sends
``2 (n - 1) / n B``, the others ``(n - 1) / n B``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from fusedops.planner.device import Device
from fusedops.planner.sharding.trace import GraphStep, TracedGraph, is_view

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
Placements = tuple[Any, ...]


@dataclass(frozen=True)
class StepCost:
    """Seconds and bytes on one rank; two of them can be added."""

    seconds: float = 0.0  # of computation and communication, forward and backward
    sent: tuple[float, ...] = (0.0,) * len(COLLECTIVES)  # bytes, in this order
    saved: float = 0.0  # bytes that stay until the backward

    def __add__(self, other: StepCost) -> StepCost:
        if self is NO_COST or other is NO_COST:
            return other if self is NO_COST else self
        sent = tuple(map(operator.add, self.sent, other.sent))
        return StepCost(self.seconds + other.seconds, sent, self.saved + other.saved)

    def times(self, count: int) -> StepCost:
        """Return the cost of as many equal steps."""
        sent = tuple(count * nbytes for nbytes in self.sent)
        return StepCost(count * self.seconds, sent, count * self.saved)


NO_COST = StepCost()


class MeshCosts:
    """Costs of collectives on the dimensions of a mesh, whose ranks are such devices."""

    def __init__(self, mesh: DeviceMesh, device: Device) -> None:
        self.device = device
        self.sizes: tuple[int, ...] = tuple(mesh.shape)
        self._rates = [
            device.collective_rate(size, math.prod(self.sizes[dim + 1 :]))
            for dim, size in enumerate(self.sizes)
        ]

    def collective(self, kind: str, nbytes: float, dim: int) -> StepCost:
        """Return the cost of one of ``COLLECTIVES`` on one mesh dimension.

        ``nbytes`` are those of the larger of its argument and its result on a rank.
        """
        size = self.sizes[dim]
        if size == 1:
            return NO_COST
        sent = nbytes * (size - 1) / size * (2 if kind == "all-reduce" else 1)
        seconds = self.device.efficiency.collective_seconds * math.sqrt(size)
        by_kind = tuple(sent if own == kind else 0.0 for own in COLLECTIVES)
        return StepCost(seconds + sent / self._rates[dim], by_kind)

    def local_bytes(self, nbytes: float, placements: Sequence[Any], *, without: int = -1) -> float:
        """Return a rank's bytes of a tensor; with ``without``, as if not sharded on that dim."""
        for dim, placement in enumerate(placements):
            if dim != without and isinstance(placement, Shard):
                nbytes /= self.sizes[dim]
        return nbytes

    def forward(self, nbytes: float, source: Placements, target: Placements) -> StepCost:
        """Return the cost of moving a tensor of ``nbytes`` (unsharded)."""
        cost = NO_COST
        for dim, (old, new) in enumerate(zip(source, target, strict=True)):
            if old == new:
                continue
            unsharded = self.local_bytes(nbytes, source, without=dim)
            if isinstance(old, Partial):
                kind = "all-reduce" if isinstance(new, Replicate) else "reduce-scatter"
                cost += self.collective(kind, unsharded, dim)
            elif isinstance(old, Shard) and isinstance(new, Shard):
                cost += self.collective("all-to-all", unsharded / self.sizes[dim], dim)
            elif isinstance(old, Shard):
                cost += self.collective("all-gather", unsharded, dim)
        return cost

    def backward(self, nbytes: float, source: Placements, gradient: Placements) -> StepCost:
        """Return the cost of moving the gradient of a tensor back to where the tensor came from."""
        back = tuple(Replicate() if isinstance(place, Partial) else place for place in source)
        return self.forward(nbytes, gradient, back)


def gradient_placements(inputs: Sequence[Placements], outputs: Sequence[Placements]) -> list[Any]:
    """Return the placements of the gradients of an operator's inputs.

    What every rank of a sharded operator reads gets a part of its gradient from each of them; the
    gradient of a sum over ranks is that of each summand.
    """

    def gradient_of(placement: Any, dim: int) -> Any:
        if isinstance(placement, Shard):
            return placement
        sharded = any(isinstance(row[dim], Shard) for row in (*inputs, *outputs))
        other_sum = any(isinstance(row[dim], Partial) for row in inputs)
        partial = isinstance(placement, Replicate) and (sharded or other_sum)
        return Partial() if partial else Replicate()

    return [tuple(gradient_of(place, dim) for dim, place in enumerate(row)) for row in inputs]


def compute_seconds(
    step: GraphStep, graph: TracedGraph, costs: MeshCosts, inputs: Sequence[Sequence[Any]]
) -> float:
    """Return the seconds of a step on one rank: a product's FLOP, or the memory's bytes."""
    if is_view(step.op):
        return 0.0
    ranks = 1
    for dim, size in enumerate(costs.sizes):
        if any(isinstance(placements[dim], Shard) for placements in inputs):
            ranks *= size
    values, device, flop = graph.values, costs.device, step.measure.flop
    if not flop and step.inputs and step.op.namespace == "fusedops":  # products with matrices
        rows, width = values[step.inputs[0]].shape[:-1], values[step.inputs[0]].shape[-1]
        sizes = [math.prod(values[n].shape) for n in step.inputs if n in graph.parameters]
        flop = 2.0 * math.prod(rows) * sum(size for size in sizes if size > 2 * width)
    used = [number for number in (*step.inputs, *step.outputs) if number >= 0]
    seconds = sum(values[number].nbytes for number in used) / ranks / device.elementwise_rate
    if flop:
        peak = device.peak_of(_DTYPE_NAMES.get(values[step.inputs[0]].dtype, "float32"))
        seconds = max(seconds, flop / ranks / (peak * device.efficiency.products))
    passes = 3 if any(values[number].needs_grad for number in step.inputs) else 1
    return passes * seconds
