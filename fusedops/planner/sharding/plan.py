"""``ShardingPlan``: where the parameters of a model are, what that costs, and how to run it so.

A plan can be printed, edited, saved as JSON, and applied to a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard

from fusedops.planner.sharding.apply import apply_placements
from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.groups import pattern_of
from fusedops.planner.sharding.placements import (
    checked_placements,
    matching_names,
    read_placement,
    show_placement,
)
from fusedops.planner.sizes import show_bytes, show_count

_OP = "ShardingPlan"
_VERSION = 1


@dataclass(frozen=True)
class PlannedParameter:
    """What a plan knows of a parameter.

    Attributes:
        shape: its global shape.
        itemsize: bytes of an element.
        trained: whether it has a gradient and states of an optimizer.
    """

    shape: tuple[int, ...]
    itemsize: int
    trained: bool


@dataclass
class PlanTotals:
    """What a training step costs on each rank.

    Attributes:
        memory: bytes of parameters, gradients, AdamW's states, buffers and saved activations.
        sent: bytes that a rank sends, by collective.
        seconds: an estimate.
    """

    memory: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class ShardingPlan:
    """Placements of all parameters of a model on a mesh; made by ``auto_parallel``.

    ``str(plan)`` is a table. ``plan[pattern] = placements`` changes a plan, before it is applied.

    Attributes:
        mode: the mode of ``auto_parallel``.
        placements: a placement for each mesh dimension, by name of the parameter.
        totals: what a step costs on each rank.
        exact: whether the search has compared all options.
        replicated_calls: operators without a rule that run on replicated tensors, with how often.
        traced: what the plan was made of: the kind of inputs, and the costs of their graph.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from fusedops.planner.sharding import PlannedParameter, ShardingPlan
        >>> plan = ShardingPlan(
        ...     mode="auto", mesh_shape=(2,), mesh_dims=("tp",), device_type="cpu",
        ...     parameters={"fc.weight": PlannedParameter((4, 8), 4, True)},
        ...     placements={"fc.weight": (Replicate(),)}, batch=2)
        >>> plan["fc.*"] = (Shard(0),)
        >>> plan["fc.weight"]
        (Shard(dim=0),)
    """

    def __init__(
        self,
        *,
        mode: str,
        mesh_shape: Sequence[int],
        mesh_dims: Sequence[str],
        device_type: str,
        parameters: Mapping[str, PlannedParameter],
        placements: Mapping[str, Placements],
        batch: int,
        local: bool = False,
        exact: bool = True,
        replicated_calls: Mapping[str, int] | None = None,
        mesh: DeviceMesh | None = None,
        totals: PlanTotals | None = None,
        estimate: Callable[[Mapping[str, Placements]], PlanTotals] | None = None,
    ) -> None:
        self.mode = mode
        self.mesh_shape = tuple(mesh_shape)
        self.mesh_dims = tuple(mesh_dims)
        self.device_type = device_type
        self.parameters = dict(parameters)
        self.placements = dict(placements)
        self.batch = batch
        self.local = local
        self.exact = exact
        self.replicated_calls = dict(replicated_calls or {})
        self.totals = totals or PlanTotals()
        self._mesh = mesh
        self._estimate = estimate
        self.traced: tuple[Any, Any] | None = None

    def __getitem__(self, pattern: str) -> Placements:
        """Return the placements of the parameters that match.

        Raises:
            KeyError: no parameter matches.
            ValueError: those that match have different placements.
        """
        names = self._matching(pattern)
        places = {self.placements[name] for name in names}
        if len(places) > 1:
            raise ValueError(f"{_OP}: parameters of {pattern!r} have different placements")
        return places.pop()

    def __setitem__(self, pattern: str, placements: Placement | Sequence[Placement]) -> None:
        """Change the placements of all parameters that match.

        Raises:
            KeyError: no parameter matches; the message has the nearest name.
            TypeError: what is given are no placements.
            ValueError: there is not one for each mesh dimension, or a size cannot be divided.
        """
        names = self._matching(pattern)
        places = {}
        for name in names:
            shape = self.parameters[name].shape
            places[name] = checked_placements(
                f"{_OP}: {name}", placements, shape, self.mesh_shape, self.mesh_dims
            )
        if self.local and any(_is_sharded(place) for place in places.values()):
            raise ValueError(
                f"{_OP}: a model that runs without a graph (mode 'data') has replicated parameters "
                'only; mode "auto" shards them'
            )
        self.placements.update(places)
        if self._estimate is not None:
            self.totals = self._estimate(self.placements)

    def __iter__(self) -> Iterator[str]:
        return iter(self.placements)

    def __len__(self) -> int:
        return len(self.placements)

    def _matching(self, pattern: str) -> list[str]:
        return matching_names(_OP, pattern, self.placements)

    def __str__(self) -> str:
        """Return the plan as a table, with totals."""
        shape = " x ".join(
            f"{dim} {size}" for dim, size in zip(self.mesh_dims, self.mesh_shape, strict=True)
        )
        rows = [("parameter", "count", "shape", "placements", "bytes per rank")]
        for (pattern, own_shape, places), names in self._grouped().items():
            nbytes = sum(self._local_bytes(name) for name in names)
            sizes = " x ".join(map(str, own_shape)) or "scalar"
            text = ", ".join(map(show_placement, places))
            rows.append((pattern, str(len(names)), sizes, text, show_bytes(int(nbytes))))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [f"{self.mode} on {shape} ({self.device_type})"]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        count = sum(math.prod(parameter.shape) for parameter in self.parameters.values())
        sent = ", ".join(
            f"{kind} {show_bytes(int(nbytes))}" for kind, nbytes in self.totals.sent.items()
        )
        lines.append(
            f"{show_count(count)} parameters; {show_bytes(int(self.totals.memory))} per rank"
        )
        lines.append(f"sent per step and rank: {sent or 'nothing'}")
        lines.append(f"estimated seconds per step: {self.totals.seconds:.3g}")
        if self.local:
            lines.append("runs the plain model on each rank's rows, without a graph")
        if self.replicated_calls:
            calls = ", ".join(f"{n} x {name}" for name, n in self.replicated_calls.items())
            lines.append(f"on replicated tensors, for lack of a rule: {calls}")
        if not self.exact:
            lines.append("the search has left options out: another plan may be faster")
        return "\n".join(lines)

    def _grouped(self) -> dict[Any, list[str]]:
        groups: dict[Any, list[str]] = {}
        for name, places in self.placements.items():
            key = (pattern_of(name), self.parameters[name].shape, places)
            groups.setdefault(key, []).append(name)
        return groups

    def _local_bytes(self, name: str) -> float:
        parameter = self.parameters[name]
        nbytes: float = math.prod(parameter.shape) * parameter.itemsize
        for size, place in zip(self.mesh_shape, self.placements[name], strict=True):
            nbytes /= size if isinstance(place, Shard) else 1
        return nbytes

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Args:
            path: of the file.
        """
        table = {
            "version": _VERSION,
            "mode": self.mode,
            "mesh": dict(zip(self.mesh_dims, self.mesh_shape, strict=True)),
            "device_type": self.device_type,
            "batch": self.batch,
            "local": self.local,
            "exact": self.exact,
            "replicated_calls": self.replicated_calls,
            "totals": vars(self.totals),
            "parameters": {
                name: {
                    "shape": list(parameter.shape),
                    "itemsize": parameter.itemsize,
                    "trained": parameter.trained,
                    "placements": [show_placement(place) for place in self.placements[name]],
                }
                for name, parameter in self.parameters.items()
            },
        }
        Path(path).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, mesh: DeviceMesh | None = None) -> ShardingPlan:
        """Read a plan that ``save`` has written.

        Args:
            path: of the file.
            mesh: where the plan will run; by default ``apply`` makes one of the saved shape.

        Returns:
            The plan, with the saved totals.

        Raises:
            ValueError: the file has no plan, or the mesh has another shape or other names.
        """
        try:
            table = json.loads(Path(path).read_text(encoding="utf-8"))
            parameters = {
                name: PlannedParameter(tuple(row["shape"]), row["itemsize"], row["trained"])
                for name, row in table["parameters"].items()
            }
            dims, shape = tuple(table["mesh"]), tuple(table["mesh"].values())
            placements = {
                name: tuple(map(read_placement, row["placements"]))
                for name, row in table["parameters"].items()
            }
            plan = cls(
                mode=table["mode"],
                mesh_shape=shape,
                mesh_dims=dims,
                device_type=table["device_type"],
                parameters=parameters,
                placements=placements,
                batch=table["batch"],
                local=table["local"],
                exact=table["exact"],
                replicated_calls=table["replicated_calls"],
                totals=PlanTotals(**table["totals"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{_OP}: {path} has no plan of ShardingPlan.save: {error}") from None
        if mesh is not None:
            if (tuple(mesh.shape), mesh.mesh_dim_names) != (shape, dims):
                raise ValueError(
                    f"{_OP}: the plan of {path} is for a mesh {table['mesh']}, "
                    f"got {dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))}"
                )
            plan._mesh = mesh
        return plan

    def copy(self) -> ShardingPlan:
        """Return a plan that can be edited without changing this one."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.placements = dict(self.placements)
        return other

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh on which the plan runs; made now for a plan that was loaded without one."""
        if self._mesh is None:
            self._mesh = init_device_mesh(
                self.device_type, self.mesh_shape, mesh_dim_names=self.mesh_dims
            )
        return self._mesh

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard a model's parameters and replace its forward. All ranks of the mesh call this.

        The model is changed and returned. It takes full tensors of the global batch, the same on
        every rank, and returns full tensors. Parameters become DTensors with the weights of the
        mesh's first rank: make the optimizer afterwards.

        Args:
            model: the model of ``auto_parallel``, or one of the same parameters.

        Returns:
            ``model``.

        Raises:
            ValueError: the parameters of the model are not those of the plan.
        """
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        return apply_placements(
            model, self.mesh, self.placements, shapes, local=self.local, traced=self.traced
        )


def _is_sharded(places: Placements) -> bool:
    return any(isinstance(place, Shard) for place in places)


def parameters_of(model: nn.Module) -> dict[str, PlannedParameter]:
    """Return the parameters of a model by the first of their names."""
    return {
        name: PlannedParameter(
            tuple(parameter.shape), parameter.element_size(), parameter.requires_grad
        )
        for name, parameter in model.named_parameters()
    }
