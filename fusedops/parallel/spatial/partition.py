"""How a tensor is cut: the cut of every dim, with the bounds of all ranks.

Everything here is arithmetic on integers that all ranks know, so no rank asks another one what it
has or needs. A cut of ``n`` ranks has ``n + 1`` bounds; rank ``r`` has the rows ``[bounds[r],
bounds[r + 1])``, maybe none. A dim has one cut at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks

Interval = tuple[int, int]
# What each rank needs of a dim: disjoint intervals of global positions, in ascending order.
Needs = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh: its name, and the process group of this rank along it."""

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int

    def __deepcopy__(self, memo: Any) -> Axis:
        return self  # copies of a module communicate in the same group


@dataclass(frozen=True)
class Cut:
    """Where a dim is cut over the ranks of an axis.

    A result of another extent is cut at the same fractions of the origin, so that tensors of one
    extent and one origin have one cut: the skip connection of a U-Net meets its decoder without a
    row being sent.
    """

    axis: Axis
    bounds: tuple[int, ...]  # of the parts of all ranks
    origin: tuple[int, ...]  # the bounds of the first layer's input, before strides

    @property
    def size(self) -> int:
        """The global extent."""
        return self.bounds[-1]

    @property
    def own(self) -> Interval:
        """The rows of this rank."""
        return self.span(self.axis.rank)

    @property
    def extent(self) -> int:
        """The number of rows of this rank."""
        start, stop = self.own
        return stop - start

    def span(self, rank: int) -> Interval:
        """Return the rows of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]

    def spans(self) -> tuple[Interval, ...]:
        """Return the rows of all ranks."""
        return tuple(itertools.pairwise(self.bounds))

    def resized(self, size: int) -> Cut:
        """Return the cut of a result of another extent: at the same fractions as the origin."""
        total = self.origin[-1]
        if total == 0:
            return replace(self, bounds=balanced(size, self.axis.size))
        bounds = tuple((2 * bound * size + total) // (2 * total) for bound in self.origin)
        return replace(self, bounds=bounds)

    def with_bounds(self, bounds: Iterable[int]) -> Cut:
        """Return a cut of the same origin at other bounds."""
        return replace(self, bounds=tuple(bounds))


@dataclass(frozen=True)
class Partition:
    """The global shape of a tensor, and the cut of every dim that has one."""

    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        pairs = zip(self.shape, self.cuts, strict=True)
        return tuple(size if cut is None else cut.extent for size, cut in pairs)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that cut something, in the order of the dims."""
        return tuple(cut.axis for cut in self.cuts if cut is not None)

    def is_cut(self, dim: int) -> bool:
        """Whether a dim has a cut."""
        return self.cuts[dim] is not None

    def cut_dims(self) -> list[int]:
        """Return the dims that have a cut."""
        return [dim for dim in range(len(self.shape)) if self.is_cut(dim)]

    def replaced(self, dim: int, size: int, cut: Cut | None = None) -> Partition:
        """Return a partition with another dim at this place."""
        shape, cuts = list(self.shape), list(self.cuts)
        shape[dim], cuts[dim] = size, cut
        return Partition(tuple(shape), tuple(cuts))

    def selected(self, dims: Iterable[int | None]) -> Partition:
        """Return the partition of these dims in this order; ``None`` is a new dim of one row."""
        places = list(dims)
        shape = tuple(1 if dim is None else self.shape[dim] for dim in places)
        return Partition(shape, tuple(None if dim is None else self.cuts[dim] for dim in places))


def uncut(shape: Iterable[int]) -> Partition:
    """Return the partition of a tensor that every rank has."""
    sizes = tuple(shape)
    return Partition(sizes, (None,) * len(sizes))


def balanced(size: int, ranks: int) -> tuple[int, ...]:
    """Return bounds of parts that differ by one row at most, the larger ones first."""
    few, more = divmod(size, ranks)
    return tuple(rank * few + min(rank, more) for rank in range(ranks + 1))


def checked_dims(op: str, mesh: DeviceMesh, dims: Any) -> dict[int, Axis]:
    """Return the axis of each dim; the dims themselves are checked where a tensor is known."""
    if not isinstance(dims, Mapping):
        checks.fail_type(op, "dims", "a dict of tensor dims to mesh axes, such as {2: 'y'}", dims)
    if not dims:
        checks.fail(op, "dims", "a dict of at least one dim, such as {2: 'y'}", "an empty one")
    if not isinstance(mesh, DeviceMesh):
        checks.fail_type(op, "mesh", "a torch.distributed.DeviceMesh with named axes", mesh)
    names = mesh.mesh_dim_names
    if not names:
        checks.fail(op, "mesh", "made with mesh_dim_names, such as ('y', 'x')", "one without")
    axes: dict[int, Axis] = {}
    for dim, name in dims.items():
        checks.integer(op, "a dim of dims", dim)
        checks.choice(op, "an axis of dims", name, names)
        group = mesh.get_group(name)
        axis = Axis(name, group, group.rank(), group.size())
        if axis in axes.values():
            checks.fail(op, "dims", "such that an axis cuts one dim", f"{name!r} for two")
        axes[dim] = axis
    return axes


def placed(op: str, axes: Mapping[int, Axis], ndim: int) -> dict[int, Axis]:
    """Return the axes by dims from 0 on, for a tensor of ``ndim`` dims."""
    result: dict[int, Axis] = {}
    for dim, axis in axes.items():
        if not -ndim <= dim < ndim:
            checks.fail(op, "a dim of dims", f"in [-{ndim}, {ndim}) for {ndim} dims", dim)
        if dim % ndim in result:
            checks.fail(op, "dims", "such that each dim stands once", f"dim {dim % ndim} twice")
        result[dim % ndim] = axis
    return result


def at_bounds(
    shape: Sequence[int], axes: Mapping[int, Axis], bounds: Mapping[int, tuple[int, ...]]
) -> Partition:
    """Return the partition of a tensor whose cut dims have these bounds, whatever its extent."""
    partition = uncut(shape)
    for dim, axis in axes.items():
        partition = partition.replaced(dim, bounds[dim][-1], Cut(axis, bounds[dim], bounds[dim]))
    return partition


def evenly(op: str, shape: Sequence[int], axes: Mapping[int, Axis]) -> Partition:
    """Return the partition of a full tensor in balanced parts."""
    axes = placed(op, axes, len(shape))
    return at_bounds(shape, axes, {d: balanced(shape[d], axis.size) for d, axis in axes.items()})


def single(spans: Sequence[Interval]) -> Needs:
    """Return needs of one interval for each rank; an empty one is none."""
    return tuple(((start, stop),) if start < stop else () for start, stop in spans)


def overlap(first: Interval, second: Interval) -> Interval | None:
    """Return what two intervals have in common, or ``None``."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def merged(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return the union of intervals as disjoint ones in ascending order."""
    result: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)
