"""Seconds of the computation of one step on a rank, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from fusedops.planner.sharding.cost import MeshCosts
from fusedops.planner.sharding.rules import VIEWS, short_name
from fusedops.planner.sharding.trace import GraphStep, TracedGraph

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def compute_seconds(
    step: GraphStep, graph: TracedGraph, costs: MeshCosts, inputs: Sequence[Sequence[Any]]
) -> float:
    """Return the seconds of a step on one rank: a product's FLOP, or the memory's bytes.

    Args:
    step: the step.
    graph: its graph.
    costs: of the mesh.
    inputs: placements of the tensors that it reads.
    """
    if short_name(step.op) in VIEWS:
        return 0.0
    ranks = 1
    for dim, size in enumerate(costs.sizes):
        if any(isinstance(placements[dim], Shard) for placements in inputs):
            ranks *= size
    values = graph.values
    passes = 3 if any(values[number].needs_grad for number in step.inputs) else 1
    device = costs.device
    used = [number for number in (*step.inputs, *step.outputs) if number >= 0]
    nbytes = sum(values[number].nbytes for number in used) / ranks
    rate = device.memory.bandwidth * device.efficiency.elementwise
    seconds = nbytes / rate
    flop = _flop(step, graph) / ranks
    if flop:
        peak = device.peak_of(_DTYPE_NAMES.get(values[step.inputs[0]].dtype, "float32"))
        seconds = max(seconds, flop / (peak * device.efficiency.products))
    return passes * seconds


def _flop(step: GraphStep, graph: TracedGraph) -> float:
    """Return the floating-point operations of a forward step; 0 if it is no product."""
    name = short_name(step.op)
    shapes = [graph.values[number].shape for number in step.inputs]
    out = graph.values[step.outputs[0]].shape if step.outputs and step.outputs[0] >= 0 else ()
    if name in ("linear", "mm", "bmm", "matmul"):
        return 2.0 * math.prod(out) * shapes[0][-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * math.prod(out) * shapes[1][-1]
    if name.startswith("conv"):
        return 2.0 * math.prod(out) * math.prod(shapes[1][1:])
    if "scaled_dot_product" in name or name.startswith("attention"):
        query, key = shapes[0], shapes[1]
        return 4.0 * math.prod(query) * key[-2]
    if step.op.namespace == "fusedops":
        weights = [number for number in step.inputs if number in graph.parameters]
        sizes = [math.prod(graph.values[number].shape) for number in weights]
        return 2.0 * math.prod(shapes[0][:-1]) * sum(n for n in sizes if n > shapes[0][-1] * 2)
    return 0.0
