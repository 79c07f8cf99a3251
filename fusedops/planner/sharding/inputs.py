"""The batch of a model's inputs, and the mesh dimensions on which it is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fusedops.planner.sharding.trace import OP

DATA_NAMES = ("dp", "data")


def data_dims(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the mesh dimensions on which the batch is sharded, by their names."""
    return tuple(dim for dim, name in enumerate(names) if name in DATA_NAMES)


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> int:
    """Return the number of rows of the inputs.

    Raises:
        ValueError: there is no tensor with rows, or the data dimension does not divide them.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    rows = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not rows:
        raise ValueError(f"{OP}: the inputs have no tensor with the batch in dim 0")
    for dim in data_dims(tuple(mesh.mesh_dim_names or ())):
        if rows[0] % mesh.size(dim):
            raise ValueError(
                f"{OP}: a batch of {rows[0]} cannot be divided by the {mesh.size(dim)} ranks of "
                f"{(mesh.mesh_dim_names or ())[dim]!r}"
            )
    return int(rows[0])
