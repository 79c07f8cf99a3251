"""Data parallelism without a graph: the plain model on each rank's rows.

Outputs with rows are gathered. A scalar is the mean of the ranks' scalars, which is the loss of the
batch where each rank's loss is a mean over equally many elements. Batch norm in training mode sees
each rank's rows only, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from fusedops.planner.sharding.inputs import batch_of


class LocalForward:
    """The forward of a model with replicated DTensor parameters.

    Args:
        model: the model; its present forward runs on local tensors.
        mesh: the mesh.
        data_dims: mesh dimensions on which the batch is sharded.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, data_dims: Sequence[int]) -> None:
        self._model = model
        self._mesh = mesh
        self._plain: Callable[..., Any] = model.forward
        self._rows = tuple(
            Shard(0) if dim in data_dims else Replicate() for dim in range(mesh.ndim)
        )
        self._sums = tuple(
            Partial() if dim in data_dims else Replicate() for dim in range(mesh.ndim)
        )
        self._replicated = tuple(Replicate() for _ in range(mesh.ndim))
        self._ranks = 1
        for dim in data_dims:
            self._ranks *= mesh.size(dim)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's rows of full tensors; return full tensors."""
        batch = batch_of(args, kwargs, self._mesh)

        def local_rows(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.shape[0] != batch:
                return leaf
            value: Any = DTensor.from_local(leaf, self._mesh, self._replicated, run_check=False)
            return value.redistribute(placements=self._rows).to_local()

        args, kwargs = pytree.tree_map(local_rows, (args, kwargs))
        outputs = self._run(args, kwargs)
        return pytree.tree_map(lambda leaf: self._full(leaf, batch), outputs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the plain forward with local parameters."""
        local: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            sharded: Any = parameter
            summed = sharded.redistribute(placements=self._replicated)
            local[name] = summed.to_local(grad_placements=self._sums)
        planned = self._model.forward
        self._model.forward = self._plain
        try:
            return torch.func.functional_call(self._model, local, args, kwargs)
        finally:
            self._model.forward = planned

    def _full(self, leaf: Any, batch: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place: tuple[Any, ...] | None = None
        if leaf.ndim and leaf.shape[0] == batch // self._ranks:
            place = self._rows
        elif not leaf.ndim and leaf.dtype.is_floating_point:
            leaf, place = leaf / self._ranks, self._sums
        if place is None:
            return leaf
        value: Any = DTensor.from_local(leaf, self._mesh, place, run_check=False)
        full = value.redistribute(placements=self._replicated)
        return full.to_local(grad_placements=self._replicated)
