"""Where each step of a graph runs: the cheapest placements that a rule allows.

Rules come from three places, in this order: ``rules.py``; DTensor's sharding propagation, with the
rules of fused operators that are registered there; and, for what neither knows, the operator on
replicated tensors. Nothing runs: rules are asked with the metadata of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from fusedops._core import sharding
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.planner.sharding.cost import (
    MeshCosts,
    Placements,
    StepCost,
    compute_seconds,
    gradient_placements,
)
from fusedops.planner.sharding.rules import RULES
from fusedops.planner.sharding.trace import (
    GraphStep,
    TracedGraph,
    ValueRef,
    arguments_by_name,
    short_name,
    substituted,
)

Places = tuple[Placements, ...]  # of each input of a step
Copies = tuple[frozenset[Any], ...]  # to which placements, and sums, each input was moved before
# A sharded parameter is used where it is, unless no rule can: its operator computes a part. Seconds
# that no other move takes.
_MOVED_PARAMETER = 1e6
# What DTensor's own dispatcher treats specially does not run on local tensors alone.
_SPECIAL = ("aten::as_strided", "aten::argmin", "aten::argmax", "aten::convolution")


@dataclass(frozen=True)
class StepPlacement:
    """Where a step runs, and what that costs."""

    inputs: tuple[Placements, ...]
    gradients: tuple[Placements, ...]  # of the inputs, as the step's backward gives them
    outputs: tuple[Placements, ...]
    args: tuple[Any, ...] | None  # with the sizes of a rank; ``None``: those of the graph
    op: Any
    replicated: bool = False  # whether the operator has no rule
    moves: tuple[tuple[int, Placements, StepCost], ...] = ()  # inputs to move, there and back
    # Inputs without a move and mesh dimensions on which their gradients are summed, with the costs
    # of an all-reduce and of a reduce-scatter.
    sums: tuple[tuple[int, int, StepCost, StepCost], ...] = ()
    seconds: float = 0.0  # of its computation, forward and backward


class Placer:
    """Chooses where the steps of one graph run, one choice per kind of step and placements.

    The batch is sharded on ``data_dims`` of the mesh.
    """

    def __init__(
        self, graph: TracedGraph, mesh: DeviceMesh, costs: MeshCosts, data_dims: Sequence[int]
    ) -> None:
        sharding.flush()  # rules of fused operators
        self.graph = graph
        self.mesh = mesh
        self.costs = costs
        self.data_dims = tuple(data_dims)
        self.other_dims = tuple(dim for dim in range(mesh.ndim) if dim not in self.data_dims)
        self.replicated: Placements = tuple(Replicate() for _ in range(mesh.ndim))
        self._chosen: dict[Any, StepPlacement] = {}

    def choose(self, step: GraphStep, current: Places, copies: Copies) -> StepPlacement:
        """Return where a step runs if its inputs are in ``current`` and, moved, in ``copies``."""
        key = (step.key, current, copies)
        if key not in self._chosen:
            placed = self._placed(step, current, copies)
            self._chosen[key] = self._priced(step, current, placed)
        return self._chosen[key]

    def even(self, number: int, placements: Placements) -> bool:
        """Whether every rank has an equal part of a value."""
        parts = list(self.graph.values[number].shape)
        for size, placement in zip(self.costs.sizes, placements, strict=True):
            if isinstance(placement, Shard):
                if placement.dim >= len(parts) or parts[placement.dim] % size:
                    return False
                parts[placement.dim] //= size
        return True

    def _placed(self, step: GraphStep, current: Places, copies: Copies) -> StepPlacement:
        if step.op._schema.name in RULES:
            return self._by_rule(step, current, copies)
        for gathered in ((), self.other_dims, range(self.mesh.ndim)):
            start = [
                tuple(
                    Replicate() if dim in gathered else placement
                    for dim, placement in enumerate(placements)
                )
                for placements in current
            ]
            placed = self._by_dtensor(step, start)
            if placed is not None:
                return placed
        everywhere = [self.replicated] * len(step.inputs), [self.replicated] * len(step.outputs)
        return replace(self._finished(*everywhere, None, step.op), replicated=True)

    def _by_rule(self, step: GraphStep, current: Places, copies: Copies) -> StepPlacement:
        """Choose a strategy of ``rules.py`` for one mesh dimension after the other."""
        tensors = [self.graph.values[number] for number in step.inputs]
        arguments = arguments_by_name(step.op, step.args, step.kwargs)
        everywhere: Sharding = ([REPLICATE] * len(tensors), [REPLICATE] * len(step.outputs))
        options = [everywhere, *RULES[step.op._schema.name](tensors, arguments)]
        numbers = (*step.inputs, *step.outputs)
        rows: list[Placements] = [self.replicated] * len(numbers)
        for dim in (*self.data_dims, *self.other_dims):
            best, chosen = math.inf, rows
            for inputs, outputs in options:
                words = (*inputs, *outputs[: len(step.outputs)])
                tried = [
                    (*row[:dim], _placement(word), *row[dim + 1 :])
                    for row, word in zip(rows, words, strict=True)
                ]
                if all(self.even(n, row) for n, row in zip(numbers, tried, strict=True)):
                    cost = self._price_of(step, current, copies, tried, dim)
                    if cost < best:
                        best, chosen = cost, tried
            rows = chosen
        return self._finished(rows[: len(tensors)], rows[len(tensors) :], None, step.op)

    def _price_of(
        self, step: GraphStep, current: Places, copies: Copies, rows: Sequence[Placements], dim: int
    ) -> float:
        """Return the seconds of what a strategy moves on one mesh dimension, and computes.

        On a dimension of the batch only the forward's moves count: activations stay sharded. What a
        rank computes a part of although all ranks have the inputs is counted as gathered later.
        """
        seconds = 0.0
        inputs, outputs = rows[: len(step.inputs)], rows[len(step.inputs) :]
        gradients = gradient_placements(inputs, outputs)
        for number, old, existing, new, gradient in zip(
            step.inputs, current, copies, inputs, gradients, strict=True
        ):
            if any(not isinstance(copy, int) and copy[dim] == new[dim] for copy in existing):
                continue
            value = self.graph.values[number]
            parameter = number in self.graph.parameters
            if parameter and isinstance(old[dim], Shard) and old[dim] != new[dim]:
                seconds += _MOVED_PARAMETER
            source = (*new[:dim], old[dim], *new[dim + 1 :])
            if isinstance(new[dim], Partial) and not isinstance(old[dim], Partial):
                source = new  # a rank's share of a replicated tensor costs nothing
            seconds += self.costs.forward(value.nbytes, source, new).seconds
            if value.needs_grad and dim not in self.data_dims:
                place = (*new[:dim], gradient[dim], *new[dim + 1 :])
                seconds += self.costs.backward(value.nbytes, source, place).seconds
        split = not any(isinstance(old[dim], Shard) for old in current)
        for number, new in zip(step.outputs, outputs, strict=True):
            if isinstance(new[dim], Partial) or (split and isinstance(new[dim], Shard)):
                target = (*new[:dim], Replicate(), *new[dim + 1 :])
                seconds += self.costs.forward(self.graph.values[number].nbytes, new, target).seconds
        if dim not in self.data_dims:
            seconds += compute_seconds(step, self.graph, self.costs, inputs)
        return seconds

    def _by_dtensor(self, step: GraphStep, current: Sequence[Placements]) -> StepPlacement | None:
        """Ask DTensor's sharding propagation; ``None`` if local tensors cannot follow its rule."""
        if not step.inputs or step.op._schema.name in _SPECIAL:
            return None
        values = self.graph.values
        replacements = iter(
            DTensorSpec(
                self.mesh,
                place,
                tensor_meta=TensorMeta(
                    torch.Size(values[number].shape), values[number].stride, values[number].dtype
                ),
            )
            for number, place in zip(step.inputs, current, strict=True)
        )
        args = substituted(step.args, replacements)
        kwargs = substituted(step.kwargs, replacements)
        schema = OpSchema(step.op, args, kwargs)
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        info = propagator.op_to_schema_info.get(step.op)
        if info is None:
            info = propagator.op_to_schema_info_for_single_dim_strategy.get(step.op)
        ask = propagator.propagate_op_sharding_non_cached
        if info is not None:  # whether lists of tensors are flattened, and what a cache compares
            schema.schema_info = info
            schema._recompute_comparison_key()
            ask = propagator.propagate_op_sharding
        try:
            result = ask(schema)
        except Exception:  # every kind of error means that there is no rule for these placements
            return None
        output, asked = result.output_spec, schema
        if result.needs_redistribute:
            asked = result.redistribute_schema
        if output is None or asked is None:
            return None
        inputs = [spec.placements for spec in _specs_in((asked.args_schema, asked.kwargs_schema))]
        if len(inputs) != len(step.inputs):
            inputs = [spec.placements for spec in _specs_in((asked.args_schema, kwargs))]
        specs = [output] if isinstance(output, DTensorSpec) else list(output)
        if len(inputs) != len(step.inputs) or len(specs) != len(step.outputs):
            return None
        outputs = [self.replicated if spec is None else tuple(spec.placements) for spec in specs]
        numbers = zip((*step.inputs, *step.outputs), (*inputs, *outputs), strict=True)
        if not all(
            all(map(_is_plain, place)) and (number < 0 or self.even(number, place))
            for number, place in numbers
        ):
            return None
        if self._runs_along_sharded(step, inputs):
            return None
        changed = None
        if result.use_val_from_redistribute_schema:
            changed = _without_specs(asked.args_schema)
        return self._finished(inputs, outputs, changed, asked.op)

    def _runs_along_sharded(self, step: GraphStep, inputs: Sequence[Placements]) -> bool:
        """Whether a step scans, sorts or indexes along a dim that is sharded.

        Torch's rules of some of these operators (``logcumsumexp``) are those of elementwise ones.
        """
        dim = arguments_by_name(step.op, step.args, step.kwargs).get("dim")
        if not isinstance(dim, int) or short_name(step.op) == "slice":
            return False
        values = self.graph.values
        rank = len(values[step.inputs[0]].shape)
        same = all(len(values[number].shape) == rank for number in step.outputs if number >= 0)
        return same and Shard(dim % max(rank, 1)) in inputs[0]

    def _finished(
        self, inputs: Sequence[Placements], outputs: Sequence[Placements], args: Any, op: Any
    ) -> StepPlacement:
        gradients = tuple(gradient_placements(inputs, outputs))
        return StepPlacement(tuple(inputs), gradients, tuple(outputs), args, op)

    def _priced(self, step: GraphStep, current: Places, placed: StepPlacement) -> StepPlacement:
        moves, sums = [], []
        for index, number in enumerate(step.inputs):
            value = self.graph.values[number]
            source, target = current[index], placed.inputs[index]
            gradient = placed.gradients[index]
            if source != target:
                cost = self.costs.forward(value.nbytes, source, target)
                if value.needs_grad:
                    cost += self.costs.backward(value.nbytes, source, gradient)
                moves.append((index, target, cost))
            elif value.needs_grad:
                nbytes = self.costs.local_bytes(value.nbytes, source)
                for dim, place in enumerate(gradient):
                    if isinstance(place, Partial):
                        reduced = self.costs.collective("all-reduce", nbytes, dim)
                        scattered = self.costs.collective("reduce-scatter", nbytes, dim)
                        sums.append((index, dim, reduced, scattered))
        seconds = compute_seconds(step, self.graph, self.costs, placed.inputs)
        return replace(placed, moves=tuple(moves), sums=tuple(sums), seconds=seconds)


def _placement(word: Any) -> Any:
    if word == REPLICATE:
        return Replicate()
    return Partial() if word == PARTIAL else Shard(int(word))


def _is_plain(placement: Any) -> bool:
    if isinstance(placement, Partial):
        return type(placement) is Partial and placement.reduce_op == "sum"
    return isinstance(placement, (Shard, Replicate)) and not isinstance(placement, _StridedShard)


def _specs_in(arguments: Any) -> list[DTensorSpec]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, DTensorSpec)]


def _without_specs(arguments: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: ValueRef(-1) if isinstance(leaf, DTensorSpec) else leaf, arguments
    )
