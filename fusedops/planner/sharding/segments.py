"""A graph as a chain of segments, of which repeated layers share one type.

The chain is cut where the fewest values are live. What a segment costs depends on the placements of
the values that enter it and of its parameters only, so a segment of a repeated layer is evaluated
once for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedops.planner.sharding.cost import Placements, StepCost
from fusedops.planner.sharding.evaluate import NOTHING, Evaluator, WalkState
from fusedops.planner.sharding.groups import ParameterGroup
from fusedops.planner.sharding.trace import GraphStep, ValueRef

# For each value that crosses a cut: its placements, and what is paid for.
FrontierState = tuple[tuple[Placements, frozenset[Any]], ...]
# Placements by group.
Assignment = tuple[tuple[int, Placements], ...]


@dataclass(frozen=True)
class SegmentType:
    """What equal segments of a chain have in common.

    Attributes:
        steps: of the first of them.
        entering: values that the first of them reads from earlier segments.
        leaving: values that later segments read.
        groups: the groups whose parameters it reads.
    """

    steps: tuple[GraphStep, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    groups: tuple[int, ...]
    parameters: tuple[tuple[int, int], ...]


@dataclass
class SegmentChain:
    """The segments of a graph in the order in which they run.

    Attributes:
        evaluator: of the graph.
        types: the different segments.
        order: the type of each segment.
    """

    evaluator: Evaluator
    types: list[SegmentType]
    order: list[int]
    _transfers: dict[Any, tuple[FrontierState, StepCost]] = field(default_factory=dict)

    def transfer(
        self, kind: int, assignment: Assignment, state: FrontierState
    ) -> tuple[FrontierState, StepCost]:
        """Return the state after a segment, and its cost.

        Args:
            kind: the segment's type.
            assignment: placements of its groups.
            state: of the values that enter it.
        """
        key = (kind, assignment, state)
        if key not in self._transfers:
            self._transfers[key] = self._walked(self.types[kind], dict(assignment), state)
        return self._transfers[key]

    def _walked(
        self, segment: SegmentType, assignment: Mapping[int, Placements], state: FrontierState
    ) -> tuple[FrontierState, StepCost]:
        walk = WalkState(dict(self.evaluator.fixed.places))
        for number, (places, charged) in zip(segment.entering, state, strict=True):
            walk.places[number] = places
            walk.charged[number] = charged
        stored = {number: assignment[group] for number, group in segment.parameters}
        cost = self.evaluator.walk(segment.steps, walk, stored)
        return tuple(
            (walk.places[number], walk.charged.get(number, NOTHING)) for number in segment.leaving
        ), cost

    def results(self, state: FrontierState) -> StepCost:
        """Return the cost of gathering the model's outputs after the last segment."""
        walk = WalkState(dict(self.evaluator.fixed.places))
        for number, (places, _) in zip(self.last_leaving, state, strict=True):
            walk.places[number] = places
        return self.evaluator.results(walk, self.evaluator.graph.outputs)

    last_leaving: tuple[int, ...] = ()


def chain_of(evaluator: Evaluator, groups: Sequence[ParameterGroup]) -> SegmentChain:
    """Return the segments of a graph."""
    graph = evaluator.graph
    group_of = {number: i for i, group in enumerate(groups) for number in group.numbers}
    steps = [step for step in graph.steps if evaluator.depends(step)]
    last_use: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.inputs:
            last_use[number] = index
    for output in (*graph.outputs, *(ValueRef(n) for n in graph.mutations.values())):
        if isinstance(output, ValueRef):
            last_use[output.number] = len(steps)
    made = {n: i for i, step in enumerate(steps) for n in step.outputs if n >= 0}
    bounds = [-1, *_cuts(steps, made, last_use, set(group_of)), len(steps) - 1]
    types: list[SegmentType] = []
    known: dict[Any, int] = {}
    order = []
    last_leaving: tuple[int, ...] = ()
    for start, stop in zip(bounds, bounds[1:], strict=False):
        part = tuple(steps[start + 1 : stop + 1])
        entering = tuple(n for n, i in made.items() if i <= start and last_use.get(n, -1) > start)
        leaving = tuple(n for n, i in made.items() if i <= stop and last_use.get(n, -1) > stop)
        key = _signature(evaluator, part, entering, leaving, group_of)
        if key not in known:
            known[key] = len(types)
            used = dict.fromkeys(n for step in part for n in step.inputs if n in group_of)
            parameters = tuple((number, group_of[number]) for number in used)
            members = tuple(dict.fromkeys(group for _, group in parameters))
            types.append(SegmentType(part, entering, leaving, members, parameters))
        order.append(known[key])
        last_leaving = leaving
    return SegmentChain(evaluator, types, order, last_leaving=last_leaving)


def _cuts(
    steps: Sequence[GraphStep],
    made: Mapping[int, int],
    last_use: Mapping[int, int],
    parameters: set[int],
) -> list[int]:
    """Return the steps after which few values are live, between uses of parameters."""
    changes = [0] * (len(steps) + 1)
    for number, index in made.items():
        end = last_use.get(number, index)
        if end > index:
            changes[index] += 1
            changes[end] -= 1
    live, total = [], 0
    for change in changes[: len(steps)]:
        total += change
        live.append(total)
    uses = [i for i, step in enumerate(steps) if any(n in parameters for n in step.inputs)]
    candidates = []
    for start, stop in zip(uses, uses[1:], strict=False):
        candidates.append(min(range(start, stop), key=lambda i: (live[i], -i)))
    kept = []
    for index, position in enumerate(candidates):
        neighbours = [*candidates[max(0, index - 1) : index], *candidates[index + 1 : index + 2]]
        if all(live[position] <= live[other] for other in neighbours):
            kept.append(position)
    return kept


def _signature(
    evaluator: Evaluator,
    steps: Sequence[GraphStep],
    entering: Sequence[int],
    leaving: Sequence[int],
    group_of: Mapping[int, int],
) -> Any:
    position: dict[int, tuple[str, Any]] = {
        number: ("entering", i) for i, number in enumerate(entering)
    }
    shown = []
    for step in steps:
        inputs: list[tuple[str, Any]] = []
        for number in step.inputs:
            if number in group_of:
                inputs.append(("group", group_of[number]))
            elif number in position:
                inputs.append(position[number])
            else:
                inputs.append(("fixed", evaluator.fixed.places[number]))
        for number in step.outputs:
            position[number] = ("inside", len(position))
        shown.append((step.key, tuple(inputs)))
    saved = tuple(evaluator.is_saved(n) for step in steps for n in step.outputs)
    return tuple(shown), tuple(position[number] for number in leaving), saved
