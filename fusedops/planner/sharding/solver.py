"""The search for the placements of parameters: dynamic programming over the steps of a graph.

A partial plan has decided the parameters that the steps so far have read. What later steps need of
it are the placements of live values and the decisions about parameters that are read again: of two
partial plans that agree on these, the slower one that needs no less memory is dropped. Beyond
``MOST_PARTIAL_PLANS`` the search is a beam, and no longer exact.

Repeated layers are walked twice, whatever their number: the second of them stands for all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch.distributed.tensor import Replicate, Shard

from fusedops.nn.vectors import pattern_of
from fusedops.planner.sharding.cost import Placements, StepCost
from fusedops.planner.sharding.evaluate import Evaluator, WalkState
from fusedops.planner.sharding.trace import GraphStep, ValueRef, short_name

MOST_PARTIAL_PLANS = 512
_PRODUCTS = ("addmm", "mm", "matmul", "bmm", "baddbmm")

Option = dict[int, Placements]  # placements of parameters that are decided together, by value


class Solution(NamedTuple):
    """Placements by name of the parameter, and whether no other option can be better."""

    placements: dict[str, Placements]
    exact: bool


class _PartialPlan(NamedTuple):
    score: float
    memory: float
    state: WalkState
    decided: dict[int, int]  # options by unit


def solve(
    evaluator: Evaluator,
    units: Sequence[Sequence[Option]],
    objective: str = "seconds",
    memory_limit: float | None = None,
) -> Solution | None:
    """Return the best placements of at most so many bytes per rank; ``None`` if none fit.

    Each unit of ``units_of`` gets one of its options. What is minimized is ``"seconds"``,
    ``"bytes"`` that are communicated, or ``"memory"``.
    """
    graph = evaluator.graph
    unit_of = {number: i for i, options in enumerate(units) for number in options[0]}
    steps, outputs = _folded(evaluator, unit_of)
    last_use: dict[int, int] = {}
    first_use: dict[int, int] = {}
    last_unit_use: dict[int, int] = {}
    for index, (step, _) in enumerate(steps):
        for number in step.inputs:
            last_use[number] = index
            if number in unit_of:
                first_use.setdefault(unit_of[number], index)
                last_unit_use[unit_of[number]] = index
    last_use |= {output.number: len(steps) for output in outputs if isinstance(output, ValueRef)}
    stored = [[_stored_bytes(evaluator, option) for option in options] for options in units]
    base = evaluator.buffer_bytes() + sum(map(min, stored))
    plans = [_PartialPlan(0.0, base, WalkState(), {})]
    exact = True

    def score(cost: StepCost) -> float:
        if objective == "bytes":
            return sum(cost.sent) + 1e-3 * cost.seconds
        return cost.saved if objective == "memory" else cost.seconds

    starts = sorted({0, *(first_use[unit] for unit in range(len(units)))})
    for start, stop in itertools.pairwise((*starts, len(steps))):
        new_units = [unit for unit, first in first_use.items() if first == start]
        needed_later = [unit for unit, last in last_unit_use.items() if last >= stop]
        buckets: dict[Any, list[_PartialPlan]] = {}
        for plan in plans:
            for picks in itertools.product(*(range(len(units[unit])) for unit in new_units)):
                decided = {**plan.decided, **dict(zip(new_units, picks, strict=True))}
                added = sum(stored[unit][decided[unit]] - min(stored[unit]) for unit in new_units)
                placed: Option = {}
                for unit, pick in decided.items():
                    placed |= units[unit][pick]
                state = WalkState(dict(plan.state.places), dict(plan.state.charged))
                cost = evaluator.walk(steps[start:stop], state, placed)
                memory = plan.memory + added + cost.saved
                if memory_limit is not None and memory > memory_limit:
                    continue
                for number in list(state.places):
                    if last_use.get(number, -1) < stop:
                        del state.places[number]
                        state.charged.pop(number, None)
                total = plan.score + score(cost) + (added if objective == "memory" else 0.0)
                new = _PartialPlan(total, memory, state, decided)
                frontier = tuple((n, p, state.charged.get(n)) for n, p in state.places.items())
                key = (frontier, tuple(decided.get(unit) for unit in needed_later))
                _insert(buckets.setdefault(key, []), new, memory_limit is not None)
        plans = list(itertools.chain(*buckets.values()))
        if len(plans) > MOST_PARTIAL_PLANS:
            exact = False
            plans = _best(plans, memory_limit is not None)
    finished = []
    for plan in plans:
        cost = evaluator.results(plan.state, outputs)
        if memory_limit is None or plan.memory + cost.saved <= memory_limit:
            finished.append((plan.score + score(cost), plan.decided))
    if not finished:
        return None
    decided = min(finished, key=lambda pair: pair[0])[1]
    placements = {}
    for unit, pick in decided.items():
        for number, places in units[unit][pick].items():
            placements[graph.parameters[number]] = places
    return Solution(placements, exact)


def _insert(bucket: list[_PartialPlan], new: _PartialPlan, with_memory: bool) -> None:
    """Add a partial plan unless one is as good; remove those that it is better than."""
    for old in bucket:
        if old.score <= new.score and (not with_memory or old.memory <= new.memory):
            return
    bucket[:] = [
        old for old in bucket if old.score < new.score or (with_memory and old.memory < new.memory)
    ]
    bucket.append(new)


def _best(plans: list[_PartialPlan], with_memory: bool) -> list[_PartialPlan]:
    """Return the fastest partial plans.

    Where memory is limited, these are those that no faster one needs less memory than, then those
    of the others of which this is true, until there are enough.
    """
    plans.sort(key=lambda plan: plan.score)
    best: list[_PartialPlan] = [] if with_memory else plans
    while len(best) < MOST_PARTIAL_PLANS:
        smallest, others = math.inf, list[_PartialPlan]()
        for plan in plans:
            (best if plan.memory < smallest else others).append(plan)
            smallest = min(smallest, plan.memory)
        plans = others
    return best[:MOST_PARTIAL_PLANS]


def _stored_bytes(evaluator: Evaluator, option: Option) -> float:
    return sum(evaluator.parameter_bytes(number, places) for number, places in option.items())


def _folded(
    evaluator: Evaluator, unit_of: Mapping[int, int]
) -> tuple[list[tuple[GraphStep, int]], list[Any]]:
    """Return steps with the number of steps that each stands for, and the outputs of the model.

    Of three or more equal parts in a row the first stays and the second stands for the others;
    later steps read the values of the second.
    """
    graph, steps = evaluator.graph, evaluator.graph.steps
    role = {n: (pattern_of(name), unit_of.get(n)) for n, name in graph.parameters.items()}
    shown = [(step.key, tuple(role.get(number) for number in step.inputs)) for step in steps]
    same: dict[int, int] = {}
    result: list[tuple[GraphStep, int]] = []
    index = 0
    while index < len(steps):
        period, repeats = _repetition(shown, index)
        for copy, place in itertools.product(range(repeats), range(period)):
            step = steps[index + copy * period + place]
            inputs = tuple(same.get(number, number) for number in step.inputs)
            if copy < 2:
                weight = repeats - 1 if copy else 1
                result.append((replace(step, inputs=inputs), weight))
            else:
                second = steps[index + period + place]
                same.update(zip(step.outputs, second.outputs, strict=True))
        index += period * repeats
    outputs = [
        ValueRef(same.get(output.number, output.number)) if isinstance(output, ValueRef) else output
        for output in graph.outputs
    ]
    return result, outputs


def _repetition(shown: Sequence[Any], start: int) -> tuple[int, int]:
    """Return the length of the part that is repeated from here on, and how often it is there."""
    best, saved = (1, 1), 0
    for period in range(1, (len(shown) - start) // 3 + 1):
        stop = start + period
        while stop < len(shown) and shown[stop] == shown[stop - period]:
            stop += 1
        repeats = (stop - start) // period
        if (repeats - 2) * period > saved:
            best, saved = (period, repeats), (repeats - 2) * period
    return best


def units_of(
    evaluator: Evaluator, fixed: Mapping[str, Placements], shard_over_data: bool
) -> list[list[Option]]:
    """Return the options of each decision of a search.

    Parameters whose names differ by layer numbers only are decided together; so are a matrix and
    the biases of its module, and matrices of one shape that read the same value (the projections
    of query, key and value). Weights of norms stay replicated on tensor-parallel dimensions.
    Parameters in ``fixed`` keep these placements.
    """
    graph, placer = evaluator.graph, evaluator.placer
    readers: dict[int, GraphStep] = {}
    for step in graph.steps:
        for number in step.inputs:
            if number in graph.parameters:
                readers.setdefault(number, step)
    groups: dict[Any, list[int]] = {}
    for number in readers:
        name, value = graph.parameters[number], graph.values[number]
        key = (pattern_of(name), value.shape, value.dtype, fixed.get(name))
        groups.setdefault(key, []).append(number)
    modules: dict[Any, list[list[int]]] = {}
    for numbers in groups.values():
        owners = sorted(graph.parameters[number].rpartition(".")[0] for number in numbers)
        modules.setdefault(tuple(owners), []).append(numbers)
    units: dict[Any, list[Option]] = {}
    for members in modules.values():
        vectors = [numbers for numbers in members if len(graph.values[numbers[0]].shape) < 2]
        for matrix in [numbers for numbers in members if numbers not in vectors]:
            step, shape = readers[matrix[0]], graph.values[matrix[0]].shape
            output_dim = len(shape) - 1 if short_name(step.op) in _PRODUCTS else 0
            width = (shape[output_dim],)
            biases = [numbers for numbers in vectors if graph.values[numbers[0]].shape == width]
            vectors = [numbers for numbers in vectors if numbers not in biases]
            options = _options(evaluator, matrix, list(itertools.chain(*biases)), output_dim)
            read = tuple(number for number in step.inputs if number not in graph.parameters)
            unit: Any = (step.op, read, shape, len(matrix), len(biases)) if read else matrix[0]
            for old, new in zip(units.setdefault(unit, options), options, strict=True):
                old.update(new)
        if vectors:
            everywhere = dict.fromkeys(itertools.chain(*vectors), placer.replicated)
            units[vectors[0][0]] = [everywhere]
    result = []
    for options in units.values():
        if shard_over_data:
            options = [*options, *(_over_data(evaluator, option) for option in options)]
        unique: list[Option] = []
        for option in options:
            option = {n: fixed.get(graph.parameters[n], place) for n, place in option.items()}
            if option not in unique:
                unique.append(option)
        result.append(unique)
    return result


def _options(
    evaluator: Evaluator, matrix: Sequence[int], biases: Sequence[int], output_dim: int
) -> list[Option]:
    """Return the placements of a matrix on the mesh dimensions that do not shard the batch."""
    placer = evaluator.placer
    rank = len(evaluator.graph.values[matrix[0]].shape)
    choices = [
        (None,) if dim in placer.data_dims else (None, *range(min(rank, 3)))
        for dim in range(placer.mesh.ndim)
    ]
    options = []
    for dims in itertools.product(*choices):
        own = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
        bias = tuple(Shard(0) if dim == output_dim else Replicate() for dim in dims)
        if placer.even(matrix[0], own):
            options.append({**dict.fromkeys(matrix, own), **dict.fromkeys(biases, bias)})
    return options


def _over_data(evaluator: Evaluator, option: Option) -> Option:
    """Return an option that also shards over the data dimensions the largest dim that fits."""
    result = {}
    for number, places in option.items():
        shape = evaluator.graph.values[number].shape
        for mesh_dim in evaluator.placer.data_dims:
            for dim in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
                tried = (*places[:mesh_dim], Shard(dim), *places[mesh_dim + 1 :])
                if evaluator.placer.even(number, tried):
                    places = tried
                    break
        result[number] = places
    return result
