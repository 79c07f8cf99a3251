"""How a tensor is cut: for every dim its factors, and for a cut factor the bounds of all ranks.

Everything here is arithmetic on integers that all ranks know, so no rank asks another one what it
has or needs. A dim is a product of factors: a plain dim has one, a dim that a view has merged (the
windows of a batch, the patches of an image) has several, of which some may be cut. A cut of ``n``
ranks has ``n + 1`` bounds; rank ``r`` has the rows ``[bounds[r], bounds[r + 1])``, maybe none.

A cut remembers the bounds of the tensor that it comes from (``root``). A result of another extent
is cut at the same fractions of it, so that tensors of one extent and one origin have one cut: the
skip connection of a U-Net meets its decoder without a row being sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fusedops._core import checks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
    """Where a dim is cut over the ranks of an axis."""

    axis: Axis
    bounds: tuple[int, ...]
    root: tuple[int, ...]

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
        return tuple(self.span(rank) for rank in range(self.axis.size))

    def resized(self, size: int) -> Cut:
        """Return the cut of a result of another extent: at the same fractions as the root."""
        total = self.root[-1]
        if total == 0:
            return replace(self, bounds=balanced(size, self.axis.size))
        bounds = tuple((2 * bound * size + total) // (2 * total) for bound in self.root)
        return replace(self, bounds=bounds)

    def moved(self, bounds: Sequence[int]) -> Cut:
        """Return a cut of the same origin at other bounds."""
        return replace(self, bounds=tuple(bounds))


@dataclass(frozen=True)
class Factor:
    """A factor of a dim: its global extent, and its cut if it has one."""

    size: int
    cut: Cut | None = None

    @property
    def extent(self) -> int:
        """The extent on this rank."""
        return self.size if self.cut is None else self.cut.extent


Factors = tuple[Factor, ...]


@dataclass(frozen=True)
class Partition:
    """The factors of every dim of a tensor."""

    dims: tuple[Factors, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(factor.size for factor in dim) for dim in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(extent(dim) for dim in self.dims)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that cut something, in the order of the dims."""
        return tuple(cut.axis for dim in self.dims for cut in cuts(dim))

    def cut(self, op: str, dim: int) -> Cut | None:
        """Return the cut of a plain dim.

        Raises:
            UnsupportedError: a view has merged several dims into it, of which one is cut.
        """
        factors = self.dims[dim]
        if len(factors) == 1:
            return factors[0].cut
        if not cuts(factors):
            return None
        shown = " x ".join(str(factor.size) for factor in factors)
        raise checks.UnsupportedError(
            f"{op}: dim {dim} is a merged view of {shown} with a cut inside; apply {op} before "
            "the view, or to spatial.gather(tensor)"
        )

    def is_cut(self, dim: int) -> bool:
        """Whether a dim has a cut."""
        return bool(cuts(self.dims[dim]))

    def cut_dims(self) -> list[int]:
        """Return the dims that have a cut."""
        return [dim for dim in range(len(self.dims)) if self.is_cut(dim)]

    def replaced(self, dim: int, *factors: Factor) -> Partition:
        """Return a partition with another dim at this place."""
        dims = list(self.dims)
        dims[dim] = simplified(factors)
        return Partition(tuple(dims))


def cuts(factors: Factors) -> list[Cut]:
    """Return the cuts of a dim."""
    return [factor.cut for factor in factors if factor.cut is not None]


def extent(factors: Factors) -> int:
    """Return the extent of a dim on this rank."""
    return math.prod(factor.extent for factor in factors)


def simplified(factors: Sequence[Factor]) -> Factors:
    """Join neighbouring factors that are not cut, and one behind a cut into it."""
    result: list[Factor] = []
    for factor in factors:
        if factor.cut is None and factor.size == 1:
            continue
        last = result[-1] if result else None
        if factor.cut is None and last is not None:
            if last.cut is None:
                result[-1] = Factor(last.size * factor.size)
            else:
                bounds = [bound * factor.size for bound in last.cut.bounds]
                result[-1] = Factor(last.size * factor.size, last.cut.moved(bounds))
            continue
        result.append(factor)
    return tuple(result) or (Factor(1),)


def plain(size: int) -> Factors:
    """Return a dim that is not cut."""
    return (Factor(size),)


def balanced(size: int, ranks: int) -> tuple[int, ...]:
    """Return bounds of parts that differ by one row at most, the larger ones first."""
    few, more = divmod(size, ranks)
    return tuple(rank * few + min(rank, more) for rank in range(ranks + 1))


def axis_of(op: str, mesh: DeviceMesh, name: Any) -> Axis:
    """Return an axis of a mesh by its name.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: it has no axis of that name.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        checks.fail_type(op, "mesh", "a torch.distributed.DeviceMesh with named axes", mesh)
    names = mesh.mesh_dim_names
    if not names:
        checks.fail(op, "mesh", "made with mesh_dim_names, such as ('y', 'x')", "one without")
    checks.choice(op, "an axis of dims", name, names)
    group = mesh.get_group(name)
    return Axis(name, group, group.rank(), group.size())


def checked_dims(op: str, mesh: DeviceMesh, dims: Any) -> dict[int, Axis]:
    """Return the axis of each dim; the dims themselves are checked where a tensor is known.

    Raises:
        TypeError: ``dims`` is no mapping of ints.
        ValueError: it is empty, names an axis that the mesh lacks, or one axis twice.
    """
    if not isinstance(dims, Mapping):
        checks.fail_type(op, "dims", "a dict of tensor dims to mesh axes, such as {2: 'y'}", dims)
    if not dims:
        checks.fail(op, "dims", "a dict of at least one dim, such as {2: 'y'}", "an empty one")
    axes: dict[int, Axis] = {}
    for dim, name in dims.items():
        checks.integer(op, "a dim of dims", dim)
        axis = axis_of(op, mesh, name)
        if axis in axes.values():
            checks.fail(op, "dims", "such that an axis cuts one dim", f"{name!r} for two")
        axes[dim] = axis
    return axes


def placed(op: str, axes: Mapping[int, Axis], ndim: int) -> dict[int, Axis]:
    """Return the axes by dims from 0 on, for a tensor of ``ndim`` dims.

    Raises:
        ValueError: a dim is outside of the tensor, or named twice.
    """
    result: dict[int, Axis] = {}
    for dim, axis in axes.items():
        if not -ndim <= dim < ndim:
            checks.fail(op, "a dim of dims", f"in [-{ndim}, {ndim}) for {ndim} dims", dim)
        if dim % ndim in result:
            checks.fail(op, "dims", "such that each dim stands once", f"dim {dim % ndim} twice")
        result[dim % ndim] = axis
    return result


def evenly(op: str, shape: Sequence[int], axes: Mapping[int, Axis]) -> Partition:
    """Return the partition of a full tensor in balanced parts."""
    dims = [plain(size) for size in shape]
    for dim, axis in placed(op, axes, len(shape)).items():
        bounds = balanced(shape[dim], axis.size)
        dims[dim] = (Factor(shape[dim], Cut(axis, bounds, bounds)),)
    return Partition(tuple(dims))


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


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of a padded dim: where they come from.

    Attributes:
        start: the source row of the first one; -1 for a constant.
        count: the number of rows.
        step: 1, -1 (reflected) or 0 (one row repeated, or a constant).
    """

    start: int
    count: int
    step: int

    @property
    def interval(self) -> Interval:
        """The source rows."""
        if self.start < 0:
            return 0, 0
        last = self.start + self.step * (self.count - 1)
        return min(self.start, last), max(self.start, last) + 1


def runs(span: Interval, size: int, mode: str) -> list[RowRun]:
    """Return the source rows of padded positions ``[start, stop)`` of a dim of ``size`` rows.

    Position ``p`` in ``[0, size)`` is row ``p``; what others are is the mode's.
    """
    position, stop = span
    result = []
    while position < stop:
        inside = 0 <= position < size
        ahead = stop if position >= size else (size if inside else 0)
        count = min(stop, ahead) - position
        if inside:
            run = RowRun(position, count, 1)
        elif mode == "constant":
            run = RowRun(-1, count, 0)
        elif mode == "replicate":
            run = RowRun(0 if position < 0 else size - 1, count, 0)
        elif mode == "circular":
            row = position % size
            run = RowRun(row, min(count, size - row), 1)
        else:
            run = _reflected(position, count, size)
        result.append(run)
        position += run.count
    return result


def _reflected(position: int, count: int, size: int) -> RowRun:
    period = 2 * (size - 1)
    row = position % period
    if row < size - 1:
        return RowRun(row, min(count, size - 1 - row), 1)
    return RowRun(period - row, min(count, period - row), -1)
