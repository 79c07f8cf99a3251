"""The search for the placements of parameters: dynamic programming over the chain of segments.

A state of the search is where the values at a cut are and what has been decided for groups that
later segments read. Of two ways to a state the one that is slower and needs no less memory is
dropped, and so are options of a segment that are never better than another, whatever enters it. The
result is therefore exact among the options, unless a limit below has been reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusedops.planner.sharding.cost import Placements, StepCost
from fusedops.planner.sharding.evaluate import Evaluator
from fusedops.planner.sharding.groups import (
    DecisionUnit,
    ParameterGroup,
    groups_of,
    sharded_over_data,
    units_of,
)
from fusedops.planner.sharding.segments import Assignment, FrontierState, SegmentChain, chain_of

# Beyond these the search is a beam, and no longer exact.
MOST_ASSIGNMENTS = 2048
MOST_LABELS = 2048


class SearchResult(NamedTuple):
    """What a search has chosen.

    Attributes:
        placements: by name of the parameter.
        objective: what was minimized, by the search's own sums.
        exact: whether no better one exists among the options.
    """

    placements: dict[str, Placements]
    objective: float
    exact: bool


class _Label(NamedTuple):
    objective: float
    memory: float
    decided: Any  # a linked list of assignments


@dataclass
class PlacementSearch:
    """A search over the placements of the parameters of one graph.

    Args:
        evaluator: of the graph.
        fixed: given placements, by name of the parameter.
        objective: ``"seconds"``, ``"bytes"`` that are communicated, or ``"memory"``.
        shard_over_data: whether parameters may also be sharded over the data dimensions.
    """

    evaluator: Evaluator
    fixed: Mapping[str, Placements]
    objective: str
    shard_over_data: bool

    def __post_init__(self) -> None:
        placer = self.evaluator.placer
        self._sizes = placer.costs.sizes
        self._data = placer.data_dims
        tensor_dims = [dim for dim in range(len(self._sizes)) if dim not in self._data]
        self.groups: list[ParameterGroup] = groups_of(self.evaluator.graph, self.fixed)
        self.units: list[DecisionUnit] = units_of(
            self.evaluator.graph, self.groups, self._sizes, tensor_dims, self.fixed
        )
        self.chain: SegmentChain = chain_of(self.evaluator, self.groups)
        self.exact = True
        self._assignments = [self._assignments_of(kind) for kind in range(len(self.chain.types))]

    def _assignments_of(self, kind: int) -> list[Assignment]:
        """Return the combinations of options of a segment's units."""
        members = self.chain.types[kind].groups
        options = []
        for unit in self.units:
            columns = [i for i, group in enumerate(unit.groups) if group in members]
            if columns:
                rows = {tuple((unit.groups[i], o[i]) for i in columns): None for o in unit.options}
                options.append(list(rows))
        options = self._limited(options)
        result: dict[Assignment, None] = {}
        for combination in itertools.product(*options):
            assignment = tuple(sorted(itertools.chain(*combination), key=lambda pair: pair[0]))
            result[assignment] = None
            if self.shard_over_data and self._data:
                result[tuple((g, self._over_data(g, p)) for g, p in assignment)] = None
        return list(result)

    def _limited(self, options: list[list[Any]]) -> list[list[Any]]:
        """Leave options out while there are too many combinations, the last of the longest."""
        count = 1
        for rows in options:
            count *= len(rows)
        while count > MOST_ASSIGNMENTS:
            self.exact = False
            longest = max(options, key=len)
            count = count // len(longest) * (len(longest) - 1)
            longest.pop()
        return options

    def _over_data(self, group: int, placements: Placements) -> Placements:
        if self.groups[group].names[0] in self.fixed:
            return placements
        return sharded_over_data(placements, self.groups[group].shape, self._sizes, self._data)

    def score(self, cost: StepCost) -> float:
        """Return what is minimized of a cost; bytes first and seconds between equal ones."""
        if self.objective == "bytes":
            return sum(cost.sent) + 1e-3 * cost.seconds
        return cost.saved if self.objective == "memory" else cost.seconds

    def stored_bytes(self, group: int, placements: Placements) -> float:
        """Return a rank's bytes of all parameters of a group, with gradients and states."""
        numbers = self.groups[group].numbers
        return len(numbers) * self.evaluator.parameter_bytes(numbers[0], placements)

    def candidates(self) -> Iterator[dict[int, Placements]]:
        """Yield every assignment of all groups that the segments' options allow."""
        for combination in itertools.product(*self._assignments):
            merged: dict[int, Placements] = {}
            pairs = list(itertools.chain(*combination))
            if all(merged.setdefault(group, place) == place for group, place in pairs):
                yield merged

    def measure(self, assignment: Mapping[int, Placements]) -> tuple[float, float]:
        """Return the objective and the bytes per rank of an assignment of all groups."""
        state: FrontierState = ()
        total = self.evaluator.fixed_cost
        for kind in self.chain.order:
            members = sorted(self.chain.types[kind].groups)
            own = tuple((group, assignment[group]) for group in members)
            state, cost = self.chain.transfer(kind, own, state)
            total += cost
        total += self.chain.results(state)
        memory = total.saved + sum(self.stored_bytes(g, p) for g, p in assignment.items())
        memory += self.evaluator.buffer_bytes()
        return (memory if self.objective == "memory" else self.score(total)), memory

    def run(self, memory_limit: float | None) -> SearchResult | None:
        """Return the best placements of at most so many bytes per rank; ``None`` if none fit."""
        self._prune(memory_limit is not None)
        base = self.evaluator.fixed_cost
        labels: dict[Any, list[_Label]] = {
            ((), ()): [_Label(0.0, base.saved + self.evaluator.buffer_bytes(), None)]
        }
        for position, kind in enumerate(self.chain.order):
            labels = self._advanced(labels, position, kind, memory_limit)
            if not labels:
                return None
        best: _Label | None = None
        for (state, _), rows in labels.items():
            cost = self.chain.results(state)
            for row in rows:
                total = row.objective + self.score(cost)
                fits = memory_limit is None or row.memory + cost.saved <= memory_limit
                if fits and (best is None or total < best.objective):
                    best = _Label(total, row.memory, row.decided)
        if best is None:
            return None
        placements = {}
        node = best.decided
        while node is not None:
            assignment, node = node
            for group, place in assignment:
                placements.update(dict.fromkeys(self.groups[group].names, place))
        return SearchResult(placements, best.objective, self.exact)

    def _advanced(
        self, labels: dict[Any, list[_Label]], position: int, kind: int, limit: float | None
    ) -> dict[Any, list[_Label]]:
        later = {g for k in self.chain.order[position + 1 :] for g in self.chain.types[k].groups}
        result: dict[Any, list[_Label]] = {}
        agreeing: dict[Any, list[Assignment]] = {}
        for (state, pending), rows in labels.items():
            decided = dict(pending)
            members = self.chain.types[kind].groups
            given = tuple((group, decided[group]) for group in members if group in decided)
            if given not in agreeing:
                agreeing[given] = [
                    assignment
                    for assignment in self._assignments[kind]
                    if all(decided.get(group, place) == place for group, place in assignment)
                ]
            for assignment in agreeing[given]:
                after, cost = self.chain.transfer(kind, assignment, state)
                new = [(group, place) for group, place in assignment if group not in decided]
                stored = sum(self.stored_bytes(group, place) for group, place in new)
                score = self.score(cost) + (stored if self.objective == "memory" else 0.0)
                kept = tuple(
                    (group, place)
                    for group, place in sorted({**decided, **dict(assignment)}.items())
                    if group in later
                )
                bucket = result.setdefault((after, kept), [])
                for row in rows:
                    memory = row.memory + stored + cost.saved
                    if limit is None or memory <= limit:
                        chain = (tuple(new), row.decided) if new else row.decided
                        label = _Label(row.objective + score, memory, chain)
                        _insert(bucket, label, limit is not None)
        return self._beam({key: rows for key, rows in result.items() if rows})

    def _beam(self, labels: dict[Any, list[_Label]]) -> dict[Any, list[_Label]]:
        count = sum(len(rows) for rows in labels.values())
        if count <= MOST_LABELS:
            return labels
        self.exact = False
        rows = [(row, key) for key, rows in labels.items() for row in rows]
        by_speed = sorted(rows, key=lambda pair: pair[0].objective)[: MOST_LABELS // 2]
        by_memory = sorted(rows, key=lambda pair: pair[0].memory)[: MOST_LABELS // 2]
        result: dict[Any, list[_Label]] = {}
        for row, key in (*by_speed, *by_memory):
            bucket = result.setdefault(key, [])
            if row not in bucket:
                bucket.append(row)
        return result

    def _prune(self, with_memory: bool) -> None:
        """Drop options of segments that another is never worse than, whatever enters."""
        entering: list[set[FrontierState]] = [set() for _ in self.chain.types]
        while True:
            before = sum(len(states) for states in entering)
            states: set[FrontierState] = {()}
            for kind in self.chain.order:
                entering[kind] |= states
                states = {
                    self.chain.transfer(kind, assignment, state)[0]
                    for assignment in self._assignments[kind]
                    for state in states
                }
            if sum(len(states) for states in entering) == before:
                break
        for kind, known in enumerate(entering):
            self._assignments[kind] = self._undominated(kind, sorted(known, key=str), with_memory)

    def _undominated(
        self, kind: int, states: Sequence[FrontierState], with_memory: bool
    ) -> list[Assignment]:
        others = {g for k, t in enumerate(self.chain.types) if k != kind for g in t.groups}
        classes: dict[Any, list[tuple[Assignment, list[float]]]] = {}
        for assignment in self._assignments[kind]:
            shared = tuple(pair for pair in assignment if pair[0] in others)
            moves = [self.chain.transfer(kind, assignment, state) for state in states]
            row = [self.score(cost) for _, cost in moves]
            own = [pair for pair in assignment if pair[0] not in others]
            stored = sum(self.stored_bytes(group, place) for group, place in own)
            count = self.chain.order.count(kind)
            if with_memory or self.objective == "memory":
                row += [cost.saved + stored / count for _, cost in moves]
            rows = classes.setdefault((shared, tuple(state for state, _ in moves)), [])
            if not any(_no_worse(other, row) for _, other in rows):
                rows[:] = [pair for pair in rows if not _no_worse(row, pair[1])]
                rows.append((assignment, row))
        return [assignment for rows in classes.values() for assignment, _ in rows]


def _no_worse(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(first, second, strict=True))


def _insert(bucket: list[_Label], label: _Label, with_memory: bool) -> None:
    """Add a label unless one of the bucket is as good; remove those that it is better than."""
    for row in bucket:
        if row.objective <= label.objective and (not with_memory or row.memory <= label.memory):
            return
    bucket[:] = [
        row
        for row in bucket
        if row.objective < label.objective or (with_memory and row.memory < label.memory)
    ]
    bucket.append(label)
