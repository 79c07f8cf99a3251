"""Which parameters are decided together, and the placements that each may have.

Parameters whose names differ by layer numbers only, of one shape and dtype, form a group. A matrix
and the biases of its module form a unit, whose options shard both alike; so do matrices of one
shape that read the same value. Weights of norms stay replicated on tensor-parallel dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.rules import short_name
from fusedops.planner.sharding.trace import TracedGraph


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one shape whose names differ by layer numbers only.

    Attributes:
        pattern: their name, with ``*`` for each number.
        shape: the shape of each.
        dtype: the dtype of each.
        names: of the parameters.
        numbers: the values of the graph that they are.
    """

    pattern: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class DecisionUnit:
    """Groups that are decided together.

    Attributes:
        groups: their positions among all groups.
        options: for each option, the placements of each group.
    """

    groups: tuple[int, ...]
    options: tuple[tuple[Placements, ...], ...]


def pattern_of(name: str) -> str:
    """Return a parameter's name with ``*`` for each part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def groups_of(graph: TracedGraph, fixed: Mapping[str, Placements]) -> list[ParameterGroup]:
    """Return the groups of the parameters that a graph uses, in the order of their first use.

    Args:
        graph: the graph.
        fixed: placements that are given, by name; those of a group agree.
    """
    first: dict[int, int] = {}
    for index, step in enumerate(graph.steps):
        for number in step.inputs:
            if number in graph.parameters:
                first.setdefault(number, index)
    members: dict[Any, list[int]] = {}
    for number in sorted(first, key=lambda value: first[value]):
        value = graph.values[number]
        name = graph.parameters[number]
        key = (pattern_of(name), value.shape, value.dtype, fixed.get(name))
        members.setdefault(key, []).append(number)
    return [
        ParameterGroup(
            key[0], key[1], key[2], tuple(graph.parameters[n] for n in numbers), tuple(numbers)
        )
        for key, numbers in members.items()
    ]


def units_of(
    graph: TracedGraph,
    groups: Sequence[ParameterGroup],
    sizes: Sequence[int],
    tensor_dims: Sequence[int],
    fixed: Mapping[str, Placements],
) -> list[DecisionUnit]:
    """Return the decisions of a search.

    Args:
        graph: the graph.
        groups: its groups.
        sizes: of the mesh.
        tensor_dims: mesh dimensions on which parameters may be sharded.
        fixed: placements that are given, by name of the parameter.
    """
    modules: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        owners = tuple(sorted(name.rpartition(".")[0] for name in group.names))
        modules.setdefault(owners, []).append(index)
    units = []
    for members in modules.values():
        matrices = [index for index in members if len(groups[index].shape) > 1]
        vectors = [index for index in members if len(groups[index].shape) <= 1]
        for matrix in matrices:
            dim = _output_dim(graph, groups[matrix])
            biases = [i for i in vectors if groups[i].shape == (groups[matrix].shape[dim],)]
            vectors = [index for index in vectors if index not in biases]
            options = _matrix_options(groups, matrix, biases, dim, sizes, tensor_dims)
            units.append(DecisionUnit((matrix, *biases), options))
        if vectors:
            replicated = tuple(Replicate() for _ in sizes)
            units.append(DecisionUnit(tuple(vectors), (tuple(replicated for _ in vectors),)))
    return [_with_fixed(unit, groups, fixed) for unit in _siblings_merged(graph, groups, units)]


def _siblings_merged(
    graph: TracedGraph, groups: Sequence[ParameterGroup], units: Sequence[DecisionUnit]
) -> list[DecisionUnit]:
    """Return the units, with one for matrices of one shape that read the same value.

    These are the projections of query, key and value, and those of a gated feed-forward layer.
    """
    readers: dict[int, Any] = {}
    for step in graph.steps:
        for number in step.inputs:
            if number in graph.parameters and number not in readers:
                others = tuple(n for n in step.inputs if n not in graph.parameters)
                readers[number] = (step.op, others)
    merged: dict[Any, list[DecisionUnit]] = {}
    for index, unit in enumerate(units):
        first = groups[unit.groups[0]]
        key: Any = index
        if len(first.shape) > 1 and readers[first.numbers[0]][1]:
            shapes = tuple(groups[group].shape for group in unit.groups)
            counts = tuple(len(groups[group].names) for group in unit.groups)
            key = (readers[first.numbers[0]], shapes, counts)
        merged.setdefault(key, []).append(unit)
    result = []
    for members in merged.values():
        options = zip(*(unit.options for unit in members), strict=True)
        combined = tuple(tuple(place for part in row for place in part) for row in options)
        members_of = tuple(group for unit in members for group in unit.groups)
        result.append(DecisionUnit(members_of, combined))
    return result


def _output_dim(graph: TracedGraph, group: ParameterGroup) -> int:
    """Return the dim of a matrix whose size is that of the module's output."""
    for step in graph.steps:
        if group.numbers[0] in step.inputs:
            direct = short_name(step.op) in ("addmm", "mm", "matmul", "bmm", "baddbmm")
            return len(group.shape) - 1 if direct else 0
    return 0


def _divides(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int]) -> bool:
    parts = [1] * len(shape)
    for place, size in zip(placements, sizes, strict=True):
        if isinstance(place, Shard):
            parts[place.dim] *= size
    return all(length % part == 0 for length, part in zip(shape, parts, strict=True))


def _matrix_options(
    groups: Sequence[ParameterGroup],
    matrix: int,
    biases: Sequence[int],
    output_dim: int,
    sizes: Sequence[int],
    tensor_dims: Sequence[int],
) -> tuple[tuple[Placements, ...], ...]:
    shape = groups[matrix].shape
    choices = [None, *range(min(len(shape), 3))]
    options = []
    for picked in itertools.product(choices, repeat=len(tensor_dims)):
        own: list[Any] = [Replicate()] * len(sizes)
        bias: list[Any] = [Replicate()] * len(sizes)
        for mesh_dim, dim in zip(tensor_dims, picked, strict=True):
            if dim is not None:
                own[mesh_dim] = Shard(dim)
                if dim == output_dim:
                    bias[mesh_dim] = Shard(0)
        if _divides(shape, own, sizes):
            options.append((tuple(own), *[tuple(bias)] * len(biases)))
    return tuple(options)


def _with_fixed(
    unit: DecisionUnit, groups: Sequence[ParameterGroup], fixed: Mapping[str, Placements]
) -> DecisionUnit:
    """Return a unit in which the given placements are the only ones."""
    given = {i: fixed[groups[i].names[0]] for i in unit.groups if groups[i].names[0] in fixed}
    if not given:
        return unit
    options = {
        tuple(given.get(index, place) for index, place in zip(unit.groups, option, strict=True))
        for option in unit.options
    }
    return DecisionUnit(unit.groups, tuple(sorted(options, key=str)))


def sharded_over_data(
    placements: Placements, shape: Sequence[int], sizes: Sequence[int], data_dims: Sequence[int]
) -> Placements:
    """Return placements that also shard a parameter over the data dimensions, where one fits."""
    result = list(placements)
    for mesh_dim in data_dims:
        for dim in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
            tried = [*result]
            tried[mesh_dim] = Shard(dim)
            if _divides(shape, tried, sizes):
                result = tried
                break
    return tuple(result)
