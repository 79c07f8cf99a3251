"""Ranks as a mesh: the same processes seen by dense layers and by experts.

The dense view is ``(pp, dp, cp, tp)``; ranks are numbered in that order, so that those that
communicate most are neighbours. Experts see ``(pp, edp, ep, tp)``: the ranks of ``dp x cp``, which
see different tokens, are divided differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from fusedops._core import checks
from fusedops.parallel.sizes import DENSE, Sizes, check_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def rank_groups(sizes: Sizes) -> dict[str, list[list[int]]]:
    """Return the ranks of each process group, by the name of its dimension.

    Args:
        sizes: of the mesh.

    Returns:
        By name, the groups that divide all ranks, each in ascending order:

        * ``"pp"``, ``"dp"``, ``"cp"``, ``"tp"``: ranks that differ along that axis only;
        * ``"data"``: ``dp x cp``: the same parameters, different tokens;
        * ``"ep"``: ranks that share the experts of a layer; ``"edp"``: those with the same experts;
          ``"expert_data"``: ``edp x tp``, because experts are not sharded by ``tp`` and their
          tokens are;
        * ``"stage"``: ``dp x cp x tp``: all of a stage.

    Raises:
        TypeError: ``sizes`` is no ``Sizes``.

    Example:
        >>> from fusedops.parallel import Sizes, rank_groups
        >>> groups = rank_groups(Sizes(dp=2, tp=2))
        >>> groups["tp"], groups["data"]
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    if not isinstance(sizes, Sizes):
        checks.fail_type("rank_groups", "sizes", "Sizes", sizes)
    dense = tuple(getattr(sizes, name) for name in DENSE)
    sparse = (sizes.pp, sizes.edp, sizes.ep, sizes.tp)
    return {
        **{name: _along(dense, (axis,)) for axis, name in enumerate(DENSE)},
        "data": _along(dense, (1, 2)),
        "stage": _along(dense, (1, 2, 3)),
        "edp": _along(sparse, (1,)),
        "ep": _along(sparse, (2,)),
        "expert_data": _along(sparse, (1, 3)),
    }


def _along(shape: Sequence[int], axes: tuple[int, ...]) -> list[list[int]]:
    """Return the groups of row-major numbers that differ along these axes only."""
    numbers = torch.arange(math.prod(shape), device="cpu").view(*shape)
    members = math.prod(shape[axis] for axis in axes)
    return numbers.movedim(axes, tuple(range(-len(axes), 0))).reshape(-1, members).tolist()


@dataclass(frozen=True)
class Mesh:
    """The process groups of a training run, as one mesh and other views of it.

    All views have one root, so that a parameter can be a DTensor on several at once.
    """

    sizes: Sizes
    dense: DeviceMesh  # ``(pp, dp, cp, tp)``
    data: DeviceMesh  # ``dp x cp`` as one dimension, ``"data"``
    sparse: DeviceMesh  # ``(edp, ep)``, the ranks of ``data`` seen by experts
    expert_data: DeviceMesh  # ``edp x tp`` as one dimension, ``"expert_data"``
    stage: DeviceMesh  # ``dp x cp x tp`` as one dimension, ``"stage"``

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return one dimension: any name that ``rank_groups`` has."""
        if name in DENSE:
            return self.dense[name]
        view: DeviceMesh = self.sparse[name] if name in ("edp", "ep") else getattr(self, name)
        return view

    def shards(self, ranks: int | None = None) -> DeviceMesh:
        """Return ``data``, or ``[copies, ranks]`` where only ``ranks`` of it shard something."""
        if ranks is None or ranks == self.sizes.data:
            return self.data
        return self.data._unflatten(0, (self.sizes.data // ranks, ranks), ("copies", "shards"))

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of one dimension."""
        return self[name].get_group()

    def rank(self, name: str) -> int:
        """Return the rank of this process along one dimension."""
        return self[name].get_local_rank()


def make_mesh(sizes: Sizes, *, device_type: str = "cpu") -> Mesh:
    """Make the process groups of a training run; every process of the job calls this.

    Args:
        sizes: of the mesh; their product is the number of processes.
        device_type: ``"cpu"``, ``"cuda"``.

    Returns:
        The mesh and its views.

    Raises:
        ValueError: the sizes do not make the number of processes.
        RuntimeError: ``torch.distributed`` is not initialised.

    Note:
        On GPUs one all-reduce of each group makes its communicator: NCCL needs all ranks of a group
        in its first communication, which might be a transfer from one rank to another.

    Example:
        >>> import torch.distributed as dist
        >>> from fusedops.parallel import Sizes, make_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> make_mesh(Sizes()).dense.mesh_dim_names
        ('pp', 'dp', 'cp', 'tp')
        >>> dist.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "make_mesh: torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    by_name = {name: getattr(sizes, name) for name in DENSE}
    check_ranks("make_mesh", by_name, dist.get_world_size(), "processes")
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    dense = init_device_mesh(device_type, tuple(by_name.values()), mesh_dim_names=DENSE)
    data = dense["dp", "cp"]._flatten("data")
    sparse = data._unflatten(0, (sizes.edp, sizes.ep), ("edp", "ep"))
    expert_data = DeviceMesh._concatenate([sparse["edp"], dense["tp"]])._flatten("expert_data")
    stage = dense["dp", "cp", "tp"]._flatten("stage")
    mesh = Mesh(sizes, dense, data, sparse, expert_data, stage)
    if device_type == "cuda":
        connect(mesh, torch.device("cuda", torch.cuda.current_device()))
    return mesh


def connect(mesh: Mesh, device: torch.device) -> None:
    """Begin each group of a mesh by an all-reduce, in the same order on all ranks."""
    for name in (*DENSE, "data", "edp", "ep", "expert_data", "stage"):
        group = mesh.group(name)
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
