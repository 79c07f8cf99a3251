"""What given placements of parameters cost: a walk over the steps of a graph, or of a part of it.

Each step runs where ``Placer`` chooses. A value that several steps need with the same other
placements is moved once, and partial gradients of a value are summed once, as the execution does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from fusedops.planner.device import Device
from fusedops.planner.sharding.cost import NO_COST, MeshCosts, Placements, StepCost
from fusedops.planner.sharding.strategies import Placer, StepPlacement
from fusedops.planner.sharding.trace import OP, FakeModel, GraphStep, ValueRef, is_view, short_name

# What is charged once for a value: a move to other placements, or the sum of its gradient on a
# mesh dimension.
Charge = Placements | int
NOTHING: frozenset[Charge] = frozenset()
DATA_NAMES = ("dp", "data")


def data_dims(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the mesh dimensions on which the batch is sharded, by their names."""
    names = mesh.mesh_dim_names or ()
    return tuple(dim for dim, name in enumerate(names) if name in DATA_NAMES)


def evaluator_for(
    fake: FakeModel, mesh: DeviceMesh, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Evaluator:
    """Trace a model for inputs, whose rows the data dimensions divide; return its graph's costs."""
    leaves, dims = pytree.tree_leaves((args, kwargs)), data_dims(mesh)
    rows = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not rows:
        raise ValueError(f"{OP}: the inputs have no tensor with the batch in dim 0")
    for dim in dims:
        if rows[0] % mesh.size(dim):
            raise ValueError(
                f"{OP}: a batch of {rows[0]} cannot be divided by the {mesh.size(dim)} ranks of "
                f"{(mesh.mesh_dim_names or ())[dim]!r}"
            )
    return Evaluator(Placer(fake.trace(args, kwargs), mesh, MeshCosts(mesh, device), dims), rows[0])


@dataclass
class WalkState:
    """Placements, and moves and sums that are paid for, by value, at some point of a walk."""

    places: dict[int, Placements] = field(default_factory=dict)
    charged: dict[int, frozenset[Charge]] = field(default_factory=dict)


class Evaluator:
    """Costs of placements of the parameters of one graph, for inputs of so many rows.

    ``parameters`` has their shapes and dtypes by name.
    """

    def __init__(self, placer: Placer, batch: int) -> None:
        self.placer = placer
        self.graph = placer.graph
        self.batch = batch
        names = self.graph.parameters
        self.parameters = {name: self.graph.values[number] for number, name in names.items()}
        self._data = placer.data_dims
        self._saved = self._saved_values()

    def _saved_values(self) -> set[int]:
        """Return the values that autograd keeps until the backward, each storage once."""
        graph = self.graph
        root: dict[int, int] = {}
        saved: set[int] = set()
        for step in graph.steps:
            if is_view(step.op) and step.inputs:
                base = root.get(step.inputs[0], step.inputs[0])
                root.update(dict.fromkeys(step.outputs, base))
            numbers = (*step.inputs, *step.outputs)
            saved.update(root.get(numbers[i], numbers[i]) for i in step.measure.saves)
        return saved - {*graph.parameters, *graph.buffers, *graph.constants}

    def input_placements(self, number: int) -> Placements:
        """Return where an input is: its rows are sharded on the data dimensions."""
        shape = self.graph.values[number].shape
        rows = bool(shape) and shape[0] == self.batch
        return tuple(
            Shard(0) if rows and dim in self._data else Replicate()
            for dim in range(self.placer.mesh.ndim)
        )

    def use_placements(self, stored: Placements) -> Placements:
        """Return where the steps see a parameter: gathered on the data dimensions."""
        return tuple(
            Replicate() if dim in self._data else place for dim, place in enumerate(stored)
        )

    def _loaded(self, number: int, stored: Mapping[int, Placements]) -> tuple[Placements, StepCost]:
        """Return where the first step finds what no step has made, and what that costs."""
        costs, nbytes = self.placer.costs, self.graph.values[number].nbytes
        if number in self.graph.inputs:
            used = self.input_placements(number)
            kept = costs.local_bytes(nbytes, used) if number in self._saved else 0.0
            return used, StepCost(saved=kept)
        if number not in stored:
            return self.placer.replicated, NO_COST
        used = self.use_placements(stored[number])
        if used == stored[number]:
            return used, NO_COST
        gathered = StepCost(saved=costs.local_bytes(nbytes, used))
        return used, costs.forward(nbytes, stored[number], used) + gathered

    def walk(
        self,
        steps: Iterable[tuple[GraphStep, int]],
        state: WalkState,
        stored: Mapping[int, Placements],
        choices: list[StepPlacement] | None = None,
    ) -> StepCost:
        """Return the cost of steps, each with how many equal ones it stands for.

        The state and the list of choices are updated; ``stored`` has the parameters' placements.
        """
        places, charged = state.places, state.charged
        local, values = self.placer.costs.local_bytes, self.graph.values
        total, seconds, saved = NO_COST, 0.0, 0.0
        for step, weight in steps:
            moved = NO_COST
            for number in step.inputs:
                if number not in places:
                    places[number], loading = self._loaded(number, stored)
                    moved += loading
            current = tuple(places[number] for number in step.inputs)
            copies = tuple(charged.get(number, NOTHING) for number in step.inputs)
            choice = self.placer.choose(step, current, copies)
            for index, target, moving in choice.moves:
                number = step.inputs[index]
                if target not in charged.get(number, NOTHING):
                    charged[number] = charged.get(number, NOTHING) | {target}
                    moved += moving
                    if index in step.measure.saves:
                        saved += weight * local(values[number].nbytes, target)
            for index, dim, reduced, scattered in choice.sums:
                number = step.inputs[index]
                if dim not in charged.get(number, NOTHING):
                    charged[number] = charged.get(number, NOTHING) | {dim}
                    sharded = number in stored and isinstance(stored[number][dim], Shard)
                    moved += scattered if sharded else reduced
            if step.measure.saves_others:
                saved += weight * local(step.measure.saves_others, choice.inputs[0])
            for number, place in zip(step.outputs, choice.outputs, strict=True):
                if number >= 0:
                    places[number] = place
                    if number in self._saved:
                        saved += weight * local(values[number].nbytes, place)
            seconds += weight * choice.seconds
            if moved is not NO_COST:
                total += moved.times(weight)
            if choices is not None:
                choices.append(choice)
        return total + StepCost(seconds, saved=saved)

    def results(self, state: WalkState, outputs: Iterable[Any]) -> StepCost:
        """Return the cost of gathering the outputs of the model on every rank."""
        total = NO_COST
        costs, target = self.placer.costs, self.placer.replicated
        for output in outputs:
            place = state.places.get(output.number) if isinstance(output, ValueRef) else None
            if place is not None and place != target:
                value = self.graph.values[output.number]
                total += costs.forward(value.nbytes, place, target)
                if value.needs_grad:
                    total += costs.backward(value.nbytes, place, target)
        return total

    def parameter_bytes(self, number: int, stored: Placements) -> float:
        """Return a rank's bytes of a parameter, its gradient and AdamW's two states."""
        value = self.graph.values[number]
        copies = 4 if value.needs_grad else 1
        return copies * self.placer.costs.local_bytes(value.nbytes, stored)

    def total_of(
        self, placements: Mapping[str, Placements]
    ) -> tuple[StepCost, float, dict[str, int]]:
        """Return what all placements by name cost, bytes per rank, and operators without a rule.

        Of these only those count for which tensors are gathered: how often, by name.
        """
        graph = self.graph
        stored = {number: placements[name] for number, name in graph.parameters.items()}
        state, choices = WalkState(), list[StepPlacement]()
        cost = self.walk(((step, 1) for step in graph.steps), state, stored, choices)
        cost += self.results(state, graph.outputs)
        memory = cost.saved + sum(self.parameter_bytes(n, p) for n, p in stored.items())
        calls = [
            short_name(step.op)
            for step, choice in zip(graph.steps, choices, strict=True)
            if choice.replicated and choice.moves
        ]
        return cost, memory + self.buffer_bytes(), dict(Counter(calls))

    def buffer_bytes(self) -> float:
        """Return the bytes of the buffers, which every rank has."""
        return float(sum(self.graph.values[number].nbytes for number in self.graph.buffers))
