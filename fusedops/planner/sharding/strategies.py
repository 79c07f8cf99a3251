"""Where each step of a graph runs: the cheapest placements that a rule allows.

Rules come from three places, in this order: ``rules.py``; DTensor's sharding propagation, with the
rules of fused operators that are registered there; and, for what neither knows, the operator on
replicated tensors. Nothing runs: rules are asked with the metadata of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from fusedops._core import sharding
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.planner.sharding.compute import compute_seconds
from fusedops.planner.sharding.cost import (
    MeshCosts,
    Placements,
    StepCost,
    gradient_placements,
)
from fusedops.planner.sharding.dtensor_rules import propagated
from fusedops.planner.sharding.rules import RULES
from fusedops.planner.sharding.trace import GraphStep, TracedGraph

# A sharded parameter is used where it is, unless no rule can: its operator computes a part. Seconds
# that no other move takes.
_MOVED_PARAMETER = 1e6


@dataclass(frozen=True)
class InputMove:
    """A tensor that a step needs with other placements, or whose gradient must be summed.

    Attributes:
        input: which of the step's inputs.
        target: its placements in the step.
        cost: of the forward and the backward move.
        copied: bytes of the moved tensor on a rank.
    """

    input: int
    target: Placements
    cost: StepCost
    copied: float = 0.0


@dataclass(frozen=True)
class StepPlacement:
    """Where a step runs.

    Attributes:
        inputs: placements of the tensors that it reads.
        gradients: placements of their gradients, as the step's backward gives them.
        outputs: placements of the tensors that it returns.
        averaged: mesh dimensions on which an output is a mean of the ranks' results.
        args: positional arguments with the sizes of a rank, or ``None``: those of the graph.
        op: the operator that runs.
        rule: ``"rule"``, ``"dtensor"``, or ``"replicated"`` for an operator without a rule.
        moves: what has to be moved for it.
        sums: gradients to sum, of inputs that need no move.
        seconds: of its computation, forward and backward.
    """

    inputs: tuple[Placements, ...]
    gradients: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    averaged: tuple[tuple[int, ...], ...]
    args: tuple[Any, ...] | None
    op: Any
    rule: str
    moves: tuple[InputMove, ...] = ()
    sums: tuple[tuple[int, int, StepCost, StepCost], ...] = ()
    seconds: float = 0.0


class Placer:
    """Chooses where the steps of one graph run, one choice per kind of step and placements.

    Args:
        graph: the graph.
        mesh: the mesh.
        costs: of its collectives.
        data_dims: mesh dimensions on which the batch is sharded.
    """

    def __init__(
        self, graph: TracedGraph, mesh: DeviceMesh, costs: MeshCosts, data_dims: Sequence[int]
    ) -> None:
        sharding.flush()  # rules of fused operators
        self.graph = graph
        self.mesh = mesh
        self.costs = costs
        self.data_dims = tuple(data_dims)
        self.replicated: Placements = tuple(Replicate() for _ in range(mesh.ndim))
        self._chosen: dict[Any, StepPlacement] = {}

    def choose(
        self,
        step: GraphStep,
        current: tuple[Placements, ...],
        copies: tuple[frozenset[Any], ...],
    ) -> StepPlacement:
        """Return where a step runs.

        Args:
            step: the step.
            current: placements of its inputs.
            copies: other placements in which they exist too, moved for earlier steps.
        """
        key = (step.key, current, copies)
        if key not in self._chosen:
            placed = self._placed(step, current, copies)
            self._chosen[key] = self._priced(step, current, placed)
        return self._chosen[key]

    def even(self, number: int, placements: Placements) -> bool:
        """Whether every rank has an equal part of a value."""
        shape = self.graph.values[number].shape
        parts = [1] * len(shape)
        for size, placement in zip(self.costs.sizes, placements, strict=True):
            if isinstance(placement, Shard):
                if placement.dim >= len(shape):
                    return False
                parts[placement.dim] *= size
        return all(size % part == 0 for size, part in zip(shape, parts, strict=True))

    def _placed(
        self,
        step: GraphStep,
        current: tuple[Placements, ...],
        copies: tuple[frozenset[Any], ...],
    ) -> StepPlacement:
        if step.op._schema.name in RULES:
            return self._by_rule(step, current, copies)
        others = [dim for dim in range(self.mesh.ndim) if dim not in self.data_dims]
        for dims in ([], others, range(self.mesh.ndim)):
            start = tuple(
                tuple(
                    Replicate() if dim in dims else placement
                    for dim, placement in enumerate(placements)
                )
                for placements in current
            )
            result = self._by_dtensor(step, start)
            if result is not None:
                return result
        return self._replicated(step)

    def _replicated(self, step: GraphStep) -> StepPlacement:
        inputs = tuple(self.replicated for _ in step.inputs)
        outputs = tuple(self.replicated for _ in step.outputs)
        averaged = tuple(() for _ in step.outputs)
        return StepPlacement(inputs, inputs, outputs, averaged, None, step.op, "replicated")

    def _by_rule(
        self,
        step: GraphStep,
        current: tuple[Placements, ...],
        copies: tuple[frozenset[Any], ...],
    ) -> StepPlacement:
        """Choose a strategy of ``rules.py`` for one mesh dimension after the other."""
        tensors = [self.graph.values[number] for number in step.inputs]
        names = [argument.name for argument in step.op._schema.arguments]
        given = {argument.name: argument.default_value for argument in step.op._schema.arguments}
        given |= {**dict(zip(names, step.args, strict=False)), **step.kwargs}
        everywhere: Sharding = ([REPLICATE] * len(tensors), [REPLICATE] * len(step.outputs))
        options = [everywhere, *RULES[step.op._schema.name](tensors, given)]
        inputs = [list(self.replicated) for _ in step.inputs]
        outputs = [list(self.replicated) for _ in step.outputs]
        order = [*self.data_dims, *(d for d in range(self.mesh.ndim) if d not in self.data_dims)]
        for dim in order:
            best = math.inf
            chosen = None
            for option in options:
                words, results = option[0], list(option[1])[: len(outputs)]
                tried_in = [[*old] for old in inputs]
                tried_out = [[*old] for old in outputs]
                for row, word in zip(tried_in, words, strict=True):
                    row[dim] = _placement(word)
                for row, word in zip(tried_out, results, strict=True):
                    row[dim] = _placement(word)
                numbers = zip((*step.inputs, *step.outputs), (*tried_in, *tried_out), strict=True)
                if not all(self.even(number, tuple(row)) for number, row in numbers):
                    continue
                cost = self._price_of(step, current, copies, tried_in, tried_out, dim)
                if cost < best:
                    best, chosen = cost, (tried_in, tried_out)
            assert chosen is not None
            inputs, outputs = chosen
        return self._finished(step, inputs, outputs, None, step.op, "rule")

    def _price_of(
        self,
        step: GraphStep,
        current: Sequence[Placements],
        copies: Sequence[frozenset[Any]],
        inputs: list[list[Any]],
        outputs: list[list[Any]],
        dim: int,
    ) -> float:
        """Return the seconds of what a strategy moves on one mesh dimension, and computes.

        On a dimension of the batch only the forward's moves count: activations stay sharded. What a
        rank computes a part of although all ranks have the inputs is counted as gathered later.
        """
        seconds = 0.0
        gradients = gradient_placements([tuple(row) for row in inputs], [tuple(o) for o in outputs])
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
                source = tuple(new)  # a rank's share of a replicated tensor costs nothing
            seconds += self.costs.forward(value.nbytes, source, tuple(new)).seconds
            if value.needs_grad and dim not in self.data_dims:
                place = (*new[:dim], gradient[dim], *new[dim + 1 :])
                seconds += self.costs.backward(value.nbytes, source, tuple(new), place).seconds
        split = not any(isinstance(old[dim], Shard) for old in current)
        for number, new in zip(step.outputs, outputs, strict=True):
            if isinstance(new[dim], Partial) or (split and isinstance(new[dim], Shard)):
                nbytes = self.graph.values[number].nbytes
                target = (*new[:dim], Replicate(), *new[dim + 1 :])
                seconds += self.costs.forward(nbytes, tuple(new), target).seconds
        return (
            seconds
            if dim in self.data_dims
            else seconds + compute_seconds(step, self.graph, self.costs, inputs)
        )

    def _by_dtensor(self, step: GraphStep, current: tuple[Placements, ...]) -> StepPlacement | None:
        asked = propagated(step, self.graph, self.mesh, current)
        if asked is None:
            return None
        numbers = zip((*step.inputs, *step.outputs), (*asked.inputs, *asked.outputs), strict=True)
        if not all(self.even(number, place) for number, place in numbers if number >= 0):
            return None
        inputs, outputs = [list(row) for row in asked.inputs], [list(row) for row in asked.outputs]
        return self._finished(step, inputs, outputs, asked.args, asked.op, "dtensor")

    def _finished(
        self,
        step: GraphStep,
        inputs: list[list[Any]],
        outputs: list[list[Any]],
        args: tuple[Any, ...] | None,
        op: Any,
        rule: str,
    ) -> StepPlacement:
        averaged = tuple(
            tuple(
                dim
                for dim, placement in enumerate(row)
                if isinstance(placement, Partial) and placement.reduce_op == "avg"
            )
            for row in outputs
        )
        places = [_summed(row) for row in outputs]
        fixed = [_summed(row) for row in inputs]
        gradients = gradient_placements(fixed, places)
        return StepPlacement(
            tuple(fixed), tuple(gradients), tuple(places), averaged, args, op, rule
        )

    def _priced(
        self, step: GraphStep, current: tuple[Placements, ...], placed: StepPlacement
    ) -> StepPlacement:
        """Add what the placements cost."""
        moves, sums = [], []
        for index, number in enumerate(step.inputs):
            value = self.graph.values[number]
            source, target = current[index], placed.inputs[index]
            gradient = placed.gradients[index]
            if source != target:
                cost = self.costs.forward(value.nbytes, source, target)
                if value.needs_grad:
                    cost += self.costs.backward(value.nbytes, source, target, gradient)
                copied = self.costs.local_bytes(value.nbytes, target)
                moves.append(InputMove(index, target, cost, copied))
            elif value.needs_grad:
                for dim, place in enumerate(gradient):
                    if isinstance(place, Partial):
                        nbytes = self.costs.local_bytes(value.nbytes, source)
                        reduced = self.costs.collective("all-reduce", nbytes, dim)
                        scattered = self.costs.collective("reduce-scatter", nbytes, dim)
                        sums.append((index, dim, reduced, scattered))
        seconds = compute_seconds(step, self.graph, self.costs, placed.inputs)
        return StepPlacement(
            placed.inputs,
            placed.gradients,
            placed.outputs,
            placed.averaged,
            placed.args,
            placed.op,
            placed.rule,
            tuple(moves),
            tuple(sums),
            seconds,
        )


def _placement(word: Any) -> Any:
    if word == REPLICATE:
        return Replicate()
    return Partial() if word == PARTIAL else Shard(int(word))


def _summed(row: Sequence[Any]) -> Placements:
    """Return placements with sums where they have means: the step divides its result."""
    return tuple(Partial() if isinstance(place, Partial) else place for place in row)
