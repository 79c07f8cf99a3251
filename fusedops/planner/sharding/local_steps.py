"""Operators whose arguments on a rank's part differ from those of the graph.

Each function gets the placements of the step, the mesh, the operator, and its arguments with local
tensors; it returns the local result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fusedops.planner.sharding.strategies import StepPlacement

LocalForm = Callable[[StepPlacement, DeviceMesh, Any, tuple[Any, ...], dict[str, Any]], Any]


def _given(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _sharded_dims(placements: Any, dim: int) -> list[int]:
    return [
        mesh_dim
        for mesh_dim, place in enumerate(placements)
        if isinstance(place, Shard) and place.dim == dim
    ]


def _reshape(
    choice: StepPlacement, mesh: DeviceMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A local tensor may have other strides than the global one: copy where a view cannot be."""
    return args[0].reshape(args[1])


def _embedding(
    choice: StepPlacement, mesh: DeviceMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Rows of the table that other ranks have are zero here."""
    given = _given(op, args, kwargs)
    weight, indices, padding = given["weight"], given["indices"], given["padding_idx"]
    dims = _sharded_dims(choice.inputs[0], 0)
    if not dims:
        return op(*args, **kwargs)
    part = 0
    coordinate = list(mesh.get_coordinate() or ())
    for dim in dims:
        part = part * mesh.size(dim) + coordinate[dim]
    rows = weight.shape[0]
    local = indices - part * rows
    outside = (local < 0) | (local >= rows)
    own_padding = padding - part * rows
    if padding < 0 or not 0 <= own_padding < rows:
        own_padding = -1
    result = op(weight, local.masked_fill(outside, 0), own_padding)
    return result.masked_fill(outside.unsqueeze(-1), 0.0)


def _cross_entropy(
    choice: StepPlacement, mesh: DeviceMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The mean over all ranks' rows: the local sum, divided by the number of all that count."""
    given = _given(op, args, kwargs)
    target, weight = given["target"], given["weight"]
    dims = _sharded_dims(choice.inputs[0], 0)
    if given["reduction"] != 1 or not dims:
        return op(*args, **kwargs)
    given["reduction"] = 2
    summed = op(*given.values())
    if target.dtype.is_floating_point:  # probabilities: the mean is over all rows
        count = summed.new_tensor(float(target.numel() // target.shape[1]))
    else:
        counts = target != given["ignore_index"]
        if weight is None:
            count = counts.sum().to(summed.dtype)
        else:
            count = (weight[target.clamp_min(0)] * counts).sum()
    for dim in dims:
        count = functional.wait_tensor(functional.all_reduce(count, "sum", (mesh, dim)))
    return summed / count


def _convolution(
    choice: StepPlacement, mesh: DeviceMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A depthwise convolution has one group for each local channel."""
    given = _given(op, args, kwargs)
    if given["groups"] == 1 or not _sharded_dims(choice.inputs[0], 1):
        return op(*args, **kwargs)
    given["groups"] = args[0].shape[1]
    return op(*given.values())


LOCAL_FORMS: dict[str, LocalForm] = {
    "view": _reshape,
    "_unsafe_view": _reshape,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
}
