"""What given placements of parameters cost: a walk over the steps of a graph, or of a part of it.

Each step runs where ``Placer`` chooses. A value that several steps need with the same other
placements is moved once, and partial gradients of a value are summed once, as the execution does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from fusedops.planner.sharding.cost import NO_COST, Placements, StepCost
from fusedops.planner.sharding.rules import (
    SAVES_NOTHING,
    SAVES_RESULT,
    SAVES_RESULT_ONLY,
    VIEWS,
    short_name,
)
from fusedops.planner.sharding.strategies import Placer, StepPlacement
from fusedops.planner.sharding.trace import GraphStep, TracedGraph

# What is charged once for a value: a move to other placements, or the sum of its gradient on a
# mesh dimension.
Charge = Placements | int
NOTHING: frozenset[Charge] = frozenset()


@dataclass
class WalkState:
    """Where values are at some point of a walk.

    Attributes:
        places: placements by value.
        charged: moves and sums that are paid for, by value.
    """

    places: dict[int, Placements] = field(default_factory=dict)
    charged: dict[int, frozenset[Charge]] = field(default_factory=dict)


class Evaluator:
    """Costs of placements of the parameters of one graph.

    Args:
        placer: chooses where steps run.
        batch: the number of rows of the inputs that are sharded.
    """

    def __init__(self, placer: Placer, batch: int) -> None:
        self.placer = placer
        self.graph = placer.graph
        self.batch = batch
        self._data = placer.data_dims
        self._saved = saved_values(self.graph)
        self._dependent: set[int] = set(self.graph.parameters)
        for step in self.graph.steps:
            if any(number in self._dependent for number in step.inputs):
                self._dependent.update(step.outputs)
        self.fixed_steps = [s for s in self.graph.steps if not self.depends(s)]
        self.fixed = self._fixed_state()

    def depends(self, step: GraphStep) -> bool:
        """Whether a step reads what a parameter has an effect on."""
        return any(number in self._dependent for number in step.inputs)

    def is_dependent(self, number: int) -> bool:
        """Whether a parameter has an effect on a value."""
        return number in self._dependent

    def is_saved(self, number: int) -> bool:
        """Whether a value is kept for the backward pass."""
        return number in self._saved

    def input_placements(self, number: int) -> Placements:
        """Return where an input is: its rows are sharded on the data dimensions."""
        shape = self.graph.values[number].shape
        rows = bool(shape) and shape[0] == self.batch
        return tuple(
            Shard(0) if rows and dim in self._data else Replicate()
            for dim in range(self.placer.mesh.ndim)
        )

    def _fixed_state(self) -> WalkState:
        state = WalkState()
        for number in (*self.graph.buffers, *self.graph.constants):
            state.places[number] = self.placer.replicated
        for number in self.graph.inputs:
            state.places[number] = self.input_placements(number)
        kept = sum(
            self.placer.costs.local_bytes(self.graph.values[number].nbytes, state.places[number])
            for number in self.graph.inputs
            if number in self._saved
        )
        self.fixed_cost = self.walk(self.fixed_steps, state, {}) + StepCost(saved=kept)
        return state

    def use_placements(self, stored: Placements) -> Placements:
        """Return where the steps see a parameter: gathered on the data dimensions."""
        return tuple(
            Replicate() if dim in self._data else place for dim, place in enumerate(stored)
        )

    def parameter_cost(self, number: int, stored: Placements) -> StepCost:
        """Return the cost of gathering a parameter that is sharded on a data dimension."""
        used = self.use_placements(stored)
        if used == stored:
            return NO_COST
        costs, value = self.placer.costs, self.graph.values[number]
        gathered = costs.local_bytes(value.nbytes, used)
        return costs.forward(value.nbytes, stored, used) + StepCost(saved=gathered)

    def walk(
        self,
        steps: Iterable[GraphStep],
        state: WalkState,
        stored: Mapping[int, Placements],
        choices: list[StepPlacement] | None = None,
    ) -> StepCost:
        """Return the cost of steps, and update the state.

        Args:
            steps: in the order in which they run.
            state: where the values before them are.
            stored: placements of the parameters, by value.
            choices: a list to which each step's choice is appended.
        """
        places, charged = state.places, state.charged
        local, values = self.placer.costs.local_bytes, self.graph.values
        total = NO_COST
        for step in steps:
            for number in step.inputs:
                if number not in places and number in stored:
                    places[number] = self.use_placements(stored[number])
                    total += self.parameter_cost(number, stored[number])
            current = tuple(places[number] for number in step.inputs)
            copies = tuple(charged.get(number, NOTHING) for number in step.inputs)
            choice = self.placer.choose(step, current, copies)
            seconds = choice.seconds
            for move in choice.moves:
                number = step.inputs[move.input]
                if move.target not in charged.get(number, NOTHING):
                    charged[number] = charged.get(number, NOTHING) | {move.target}
                    keeps = short_name(step.op) not in SAVES_NOTHING
                    total += move.cost
                    if keeps and values[number].needs_grad:
                        total += StepCost(saved=move.copied)
            for index, dim, reduced, scattered in choice.sums:
                number = step.inputs[index]
                if dim not in charged.get(number, NOTHING):
                    charged[number] = charged.get(number, NOTHING) | {dim}
                    kept = stored.get(number)
                    sharded = kept is not None and isinstance(kept[dim], Shard)
                    total += scattered if sharded else reduced
            saved = 0.0
            for number, place in zip(step.outputs, choice.outputs, strict=True):
                if number >= 0:
                    places[number] = place
                    if number in self._saved:
                        saved += local(values[number].nbytes, place)
            total += StepCost(seconds, saved=saved)
            if choices is not None:
                choices.append(choice)
        return total

    def results(self, state: WalkState, outputs: Iterable[Any]) -> StepCost:
        """Return the cost of gathering the outputs of the model on every rank."""
        total = NO_COST
        costs = self.placer.costs
        for output in outputs:
            number = getattr(output, "number", None)
            if number is None:
                continue
            value, place = self.graph.values[number], state.places.get(number)
            if place is not None and place != self.placer.replicated:
                target = self.placer.replicated
                total += costs.forward(value.nbytes, place, target)
                if value.needs_grad:
                    total += costs.backward(value.nbytes, place, target, target)
        return total

    def parameter_bytes(self, number: int, stored: Placements) -> float:
        """Return a rank's bytes of a parameter, its gradient and AdamW's two states."""
        value = self.graph.values[number]
        copies = 4 if value.needs_grad else 1
        return copies * self.placer.costs.local_bytes(value.nbytes, stored)

    def total(
        self, stored: Mapping[int, Placements], choices: list[StepPlacement] | None = None
    ) -> tuple[StepCost, float]:
        """Return the cost of a step and its bytes per rank, for all parameters' placements."""
        state = WalkState()
        state.places.update(self.fixed.places)
        dependent = [step for step in self.graph.steps if self.depends(step)]
        cost = self.fixed_cost + self.walk(dependent, state, stored, choices)
        cost += self.results(state, self.graph.outputs)
        memory = cost.saved + sum(self.parameter_bytes(n, p) for n, p in stored.items())
        return cost, memory + self.buffer_bytes()

    def buffer_bytes(self) -> float:
        """Return the bytes of the buffers, which every rank has."""
        return float(sum(self.graph.values[number].nbytes for number in self.graph.buffers))


def saved_values(graph: TracedGraph) -> set[int]:
    """Return the values that autograd keeps until the backward pass, each storage once."""
    root: dict[int, int] = {}
    saved: set[int] = set()
    kept_elsewhere = {*graph.parameters, *graph.buffers, *graph.constants}
    for step in graph.steps:
        name = short_name(step.op)
        if name in VIEWS and step.inputs:
            for number in step.outputs:
                root[number] = root.get(step.inputs[0], step.inputs[0])
        if not any(graph.values[number].needs_grad for number in step.inputs):
            continue
        read = [root.get(number, number) for number in step.inputs]
        if name in SAVES_RESULT or step.op.namespace == "fusedops":
            saved.update(number for number in step.outputs if number >= 0)
        if name not in SAVES_NOTHING and name not in SAVES_RESULT_ONLY:
            needed = read
            if name in ("mul", "div"):  # a factor is saved if the other one has a gradient
                tensors = list(zip(step.inputs, read, strict=True))
                needed = [
                    own
                    for number, own in tensors
                    if any(graph.values[n].needs_grad for n, _ in tensors if n != number)
                    or len(tensors) > len(dict(tensors))
                ]
            saved.update(needed)
    return {number for number in saved if number not in kept_elsewhere and number >= 0}
