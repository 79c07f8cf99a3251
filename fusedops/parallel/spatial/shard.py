"""The public functions: parts of tensors, halos, and modules that take parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial.align import gathered, slice_dim
from fusedops.parallel.spatial.padding import padded_rows
from fusedops.parallel.spatial.partition import Axis, at_bounds, checked_dims, evenly, placed
from fusedops.parallel.spatial.tensor import SpatialTensor, replicated, unwrap, wrap

MODES = ("none", "zeros", "reflect", "replicate", "circular")


def scatter(tensor: Tensor, mesh: DeviceMesh, dims: Mapping[int, str]) -> SpatialTensor:
    """Return this process's part of a tensor that all processes have.

    Args:
        tensor: the same on all ranks of the axes, of any dtype.
        mesh: with named axes; others than those of ``dims`` may be in it.
        dims: which dim is cut over which axis, ``{2: "y", 3: "x"}``.

    Returns:
        A ``SpatialTensor`` of the same global shape. Parts differ by one row at most.

    Raises:
        ValueError: a dim is outside of the tensor, or an axis not in the mesh.
        TypeError: an argument has another type, or the tensor is cut already.

    Note:
        No communication. The gradient of ``tensor`` is complete on every rank.
    """
    checks.tensor("scatter", "tensor", tensor, floating=False)
    if isinstance(tensor, SpatialTensor):
        raise TypeError("scatter: tensor is cut already; spatial.gather it first")
    axes = checked_dims("scatter", mesh, dims)
    partition = evenly("scatter", tensor.shape, axes)
    local = replicated(tensor, partition.axes)
    for dim, cut in enumerate(partition.cuts):
        local = local if cut is None else slice_dim(local, dim, cut)
    return wrap(local.clone(memory_format=torch.preserve_format), partition)


def gather(tensor: Tensor, dims: Iterable[int] | None = None) -> Tensor:
    """Return the complete tensor on every process.

    Args:
        tensor: a ``SpatialTensor``; a plain tensor is complete already and returned. Of a plain
            part, ``from_parts`` makes a ``SpatialTensor``.
        dims: the cut dims to gather (by default all).

    Returns:
        The tensor; its gradient must be the same on all ranks, as that of any replicated tensor.

    Raises:
        ValueError: a dim is outside of the tensor.
        TypeError: an argument has another type.
    """
    checks.tensor("gather", "tensor", tensor, floating=False)
    if dims is None:
        return gathered(tensor)
    for dim in dims:
        checks.integer("gather", "a dim of dims", dim)
        if not -tensor.dim() <= dim < tensor.dim():
            checks.fail("gather", "a dim of dims", f"one of the {tensor.dim()} dims", dim)
    return gathered(tensor, {dim % tensor.dim() for dim in dims})


def from_parts(
    part: Tensor,
    mesh: DeviceMesh,
    dims: Mapping[int, str],
    *,
    extents: Mapping[int, Sequence[int]] | None = None,
) -> SpatialTensor:
    """Return a ``SpatialTensor`` of which every process has read its own part.

    Args:
        part: this process's part, of any extent along the cut dims; it is not copied.
        mesh: with named axes.
        dims: which dim is cut over which axis, ``{2: "y", 3: "x"}``.
        extents: by cut dim, the rows of the part of every rank of its axis, the same on all ranks:
            ``{2: (361, 360), 3: (720, 720)}``. Without it the ranks gather their extents in every
            call: one all-gather for each axis, for which the host waits.

    Returns:
        The tensor, whose shape is global along the cut dims.

    Raises:
        ValueError: the parts or ``extents`` do not fit together.
        TypeError: an argument has another type, or the tensor is cut already.
    """
    op = "from_parts"
    checks.tensor(op, "part", part, floating=False)
    if isinstance(part, SpatialTensor):
        raise TypeError("from_parts: part is a SpatialTensor already; pass it on unchanged")
    axes = placed(op, checked_dims(op, mesh, dims), part.dim())
    if extents is None:
        return _partitioned(op, part, axes)
    if sorted(dim % part.dim() for dim in extents) != sorted(axes):
        checks.fail(op, "extents", f"given for dims {sorted(axes)}", sorted(extents))
    by_dim = {dim % part.dim(): tuple(sizes) for dim, sizes in extents.items()}
    for dim, axis in axes.items():
        sizes, rows = by_dim[dim], part.shape[dim]
        are_rows = all(isinstance(size, int) and size >= 0 for size in sizes)
        if not are_rows or len(sizes) != axis.size or sizes[axis.rank] != rows:
            own = f"{rows} for rank {axis.rank}, whose part has as many rows"
            expected = f"{axis.size} integers >= 0, one for each rank, with {own}"
            checks.fail(op, f"extents of dim {dim}", expected, sizes)
    return _partitioned(op, part, axes, by_dim)


def _partitioned(op: str, part: Tensor, axes: Mapping[int, Axis], extents: Any = None) -> Any:
    """Return a SpatialTensor of plain parts, whose extents the ranks gather if they are unknown."""
    extents = _gathered_extents(op, part, axes) if extents is None else extents
    bounds = {dim: tuple(itertools.accumulate((0, *sizes))) for dim, sizes in extents.items()}
    return wrap(part, at_bounds(part.shape, axes, bounds))


def _gathered_extents(op: str, part: Tensor, axes: Mapping[int, Axis]) -> dict[int, list[int]]:
    extents = {}
    for dim, axis in axes.items():
        own_shape = device_tensor(part.shape, torch.int64, part.device)
        received = collectives.all_gather(own_shape, axis.group, label="extents").wait()
        shapes = received.view(axis.size, -1).tolist()
        for place in sorted(set(range(part.dim())) - set(axes)):
            sizes = [shape[place] for shape in shapes]
            if len(set(sizes)) > 1:
                ranks = f"alike on all ranks of {axis.name!r}"
                checks.fail(op, f"dim {place}, which is not cut,", ranks, sizes)
        extents[dim] = [shape[dim] for shape in shapes]
    return extents


def halo_exchange(
    tensor: SpatialTensor, halo: Mapping[int, tuple[int, int]], *, mode: str = "none"
) -> Tensor:
    """Return this process's part with rows of its neighbours around it.

    Args:
        tensor: of ``scatter`` or ``from_parts``.
        halo: by cut dim, the rows before and behind the part; maybe more than a neighbour has.
        mode: what is at the borders of the complete tensor: ``"none"`` (nothing is added),
            ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns:
        A plain tensor, maybe the part itself. Its gradients go back to the ranks whose rows these
        are, and are added.

    Raises:
        ValueError: a halo is negative or wider than the mode allows, or a dim is not cut.
        TypeError: the tensor is plain.
    """
    op = "halo_exchange"
    checks.choice(op, "mode", mode, MODES)
    if not isinstance(tensor, SpatialTensor):
        checks.fail_type(op, "tensor", "a SpatialTensor, as from_parts makes of a part", tensor)
    local = unwrap(tensor)
    by_dim = {dim % tensor.dim(): widths for dim, widths in halo.items()}
    for dim, widths in by_dim.items():
        for width in widths:
            checks.integer(op, f"the halo of dim {dim}", width, least=0)
        cut = tensor._partition.cuts[dim]
        if cut is None:
            cut_dims = tensor._partition.cut_dims()
            checks.fail(op, "a dim of halo", f"one of the cut dims {cut_dims}", dim)
        spans = [(start - widths[0], stop + widths[1]) for start, stop in cut.spans()]
        if mode == "none":
            spans = [(max(0, start), min(cut.size, stop)) for start, stop in spans]
        kind = "constant" if mode in ("none", "zeros") else mode
        local = padded_rows(op, local, dim, cut, spans, kind)
    return local


class SpatialModule(nn.Module):
    """Mixed into the class of a sharded module: plain inputs are parts, and it is not compiled."""

    _spatial_axes: dict[int, Axis]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Convert plain parts, and call the module's own forward."""
        args = tuple(self._converted(x) for x in args)
        kwargs = {name: self._converted(x) for name, x in kwargs.items()}
        return super().forward(*args, **kwargs)

    def _converted(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, SpatialTensor):
            return x
        axes = self._spatial_axes
        if any(not -x.dim() <= dim < x.dim() for dim in axes):
            return x
        return _partitioned("shard", x, placed("shard", axes, x.dim()))


def shard(module: nn.Module, mesh: DeviceMesh, *, dims: Mapping[int, str]) -> Any:
    """Let an unchanged module compute on parts of its inputs.

    Args:
        module: any module whose functions have rules (docs/spatial.md).
        mesh: with named axes.
        dims: which dim of an input is cut over which axis, ``{2: "y", 3: "x"}``.

    Returns:
        The same module. It takes ``SpatialTensor``s, or plain parts of this process, in every
        argument that has these dims, and returns ``SpatialTensor``s. Parameters and buffers are
        those of the first rank, plain and complete; every rank gets their complete gradients.

    Raises:
        ValueError: ``dims`` do not fit the mesh.
        TypeError: ``module`` is no module.
        UnsupportedError: a layer cannot be cut.
    """
    checks.module("shard", module)
    axes = checked_dims("shard", mesh, dims)
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise checks.UnsupportedError(
                f"shard: {name} is a SyncBatchNorm, which communicates by itself; use BatchNorm, "
                "whose statistics are those of the complete tensor here"
            )
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                for axis in axes.values():
                    collectives.broadcast(tensor.data, axis.group, label="shard").wait()
    object.__setattr__(module, "_spatial_axes", axes)
    kind = type(module)
    if not issubclass(kind, SpatialModule):
        module.__class__ = type(f"Spatial{kind.__name__}", (SpatialModule, kind), {})
    return module
