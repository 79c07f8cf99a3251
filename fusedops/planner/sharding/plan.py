"""``ShardingPlan``: where the parameters of a model are, what that costs, and how to run it so.

A plan can be printed, edited, saved as JSON, and applied to a model.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fusedops._core import checks
from fusedops.models.vectors import pattern_of
from fusedops.planner.sharding.cost import COLLECTIVES, Placements
from fusedops.planner.sharding.evaluate import Evaluator
from fusedops.planner.sharding.run import apply_placements
from fusedops.planner.sizes import show_bytes, show_count

_OP = "ShardingPlan"
_SAVED = ("mode", "device_type", "local", "exact", "replicated_calls")


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

    @property
    def nbytes(self) -> int:
        """Its bytes, unsharded."""
        return math.prod(self.shape) * self.itemsize


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


@dataclass(eq=False)
class ShardingPlan:
    """Placements of all parameters of a model on a mesh; made by ``auto_parallel``.

    ``str(plan)`` is a table. ``plan[pattern] = placements`` changes a plan, before it is applied.

    Attributes:
        mode: the mode of ``auto_parallel``.
        mesh_shape: ranks on each dimension of the mesh.
        mesh_dims: names of these dimensions.
        device_type: of the mesh, for example ``"cuda"``.
        parameters: what is known of each parameter, by name.
        placements: a placement for each mesh dimension, by name of the parameter.
        local: whether the model runs without a graph.
        exact: whether the search has compared all options.
        replicated_calls: operators without a rule that run on replicated tensors, with how often.
        totals: what a step costs on each rank.
        traced: what the plan was made of: the kind of inputs, and the costs of their graph.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from fusedops.planner.sharding import PlannedParameter, ShardingPlan
        >>> plan = ShardingPlan(
        ...     mode="auto", mesh_shape=(2,), mesh_dims=("tp",), device_type="cpu",
        ...     parameters={"fc.weight": PlannedParameter((4, 8), 4, True)},
        ...     placements={"fc.weight": (Replicate(),)})
        >>> plan["fc.*"] = (Shard(0),)
        >>> plan["fc.weight"]
        (Shard(dim=0),)
    """

    mode: str
    mesh_shape: tuple[int, ...]
    mesh_dims: tuple[str, ...]
    device_type: str
    parameters: dict[str, PlannedParameter]
    placements: dict[str, Placements]
    local: bool = False
    exact: bool = True
    replicated_calls: dict[str, int] = field(default_factory=dict)
    totals: PlanTotals = field(default_factory=PlanTotals)
    traced: tuple[Any, Evaluator] | None = None
    _mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.traced is not None:
            cost, memory, self.replicated_calls = self.traced[1].total_of(self.placements)
            sent = {kind: n for kind, n in zip(COLLECTIVES, cost.sent, strict=True) if n}
            self.totals = PlanTotals(memory, sent, cost.seconds)

    def __getitem__(self, pattern: str) -> Placements:
        """Return the placements of the parameters that match.

        Raises:
            KeyError: no parameter matches.
            ValueError: those that match have different placements.
        """
        names = matching_names(_OP, pattern, self.placements)
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
        places = {}
        for name in matching_names(_OP, pattern, self.placements):
            shape = self.parameters[name].shape
            places[name] = checked_placements(
                f"{_OP}: {name}", placements, shape, self.mesh_shape, self.mesh_dims
            )
        if self.local and any(isinstance(p, Shard) for own in places.values() for p in own):
            raise ValueError(
                f"{_OP}: a model that runs without a graph (mode 'data') has replicated parameters "
                'only; mode "auto" shards them'
            )
        self.placements.update(places)
        self.__post_init__()

    def __iter__(self) -> Iterator[str]:
        return iter(self.placements)

    def __str__(self) -> str:
        """Return the plan as a table, with totals."""
        groups: dict[Any, list[str]] = {}
        for name, places in self.placements.items():
            shape = " x ".join(map(str, self.parameters[name].shape)) or "scalar"
            key = (pattern_of(name), shape, ", ".join(map(_show_placement, places)))
            groups.setdefault(key, []).append(name)
        rows = [("parameter", "count", "shape", "placements", "bytes per rank")]
        for (pattern, shape, text), names in groups.items():
            nbytes = show_bytes(int(sum(map(self._local_bytes, names))))
            rows.append((pattern, str(len(names)), shape, text, nbytes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sizes = zip(self.mesh_dims, map(str, self.mesh_shape), strict=True)
        count = sum(math.prod(parameter.shape) for parameter in self.parameters.values())
        sent = [f"{kind} {show_bytes(int(n))}" for kind, n in self.totals.sent.items()]
        lines = [
            f"{self.mode} on {' x '.join(map(' '.join, sizes))} ({self.device_type})",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            f"{show_count(count)} parameters; {show_bytes(int(self.totals.memory))} per rank",
            f"sent per step and rank: {', '.join(sent) or 'nothing'}",
            f"estimated seconds per step: {self.totals.seconds:.3g}",
        ]
        if self.local:
            lines.append("runs the plain model on each rank's rows, without a graph")
        if self.replicated_calls:
            calls = ", ".join(f"{n} x {name}" for name, n in self.replicated_calls.items())
            lines.append(f"on replicated tensors, for lack of a rule: {calls}")
        if not self.exact:
            lines.append("the search has left options out: another plan may be faster")
        return "\n".join(lines)

    def _local_bytes(self, name: str) -> float:
        nbytes: float = self.parameters[name].nbytes
        for size, place in zip(self.mesh_shape, self.placements[name], strict=True):
            nbytes /= size if isinstance(place, Shard) else 1
        return nbytes

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Args:
            path: of the file.
        """
        table = {
            "version": 1,
            "mesh": dict(zip(self.mesh_dims, self.mesh_shape, strict=True)),
            **{name: getattr(self, name) for name in _SAVED},
            "totals": vars(self.totals),
            "parameters": {
                name: {
                    **vars(parameter),
                    "placements": [_show_placement(place) for place in self.placements[name]],
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
            rows = table["parameters"]
            plan = cls(
                mesh_shape=tuple(table["mesh"].values()),
                mesh_dims=tuple(table["mesh"]),
                parameters={
                    name: PlannedParameter(tuple(row["shape"]), row["itemsize"], row["trained"])
                    for name, row in rows.items()
                },
                placements={
                    name: tuple(map(_read_placement, row["placements"]))
                    for name, row in rows.items()
                },
                totals=PlanTotals(**table["totals"]),
                _mesh=mesh,
                **{name: table[name] for name in _SAVED},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{_OP}: {path} has no plan of ShardingPlan.save: {error}") from None
        own = (plan.mesh_shape, plan.mesh_dims)
        if mesh is not None and (tuple(mesh.shape), mesh.mesh_dim_names) != own:
            raise ValueError(
                f"{_OP}: the plan of {path} is for a mesh {table['mesh']}, "
                f"got {dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))}"
            )
        return plan

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


def matching_names(op: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names of parameters that a pattern matches, or whose module it matches.

    Raises:
        KeyError: there is none; the message has the nearest name.
    """
    of_module = f"{pattern}.*"
    matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    matches += [n for n in names if fnmatch.fnmatchcase(n, of_module) and n not in matches]
    if not matches:
        known = list(dict.fromkeys([*map(pattern_of, names), *names]))
        near = checks.nearest(pattern, known)
        hint = f"did you mean {near!r}" if near else f"one is {known[0]!r}" if known else "none"
        raise KeyError(f"{op}: no parameter matches {pattern!r}: {hint}")
    return matches


def checked_placements(
    what: str,
    placements: Any,
    shape: Sequence[int],
    sizes: Sequence[int],
    dims: Sequence[str],
) -> Placements:
    """Return placements of a parameter as a tuple.

    Raises:
        TypeError: they are no placements.
        ValueError: there is not one for each mesh dimension, or a size cannot be divided.
    """
    if isinstance(placements, Placement):
        placements = (placements,)
    if not isinstance(placements, (tuple, list)) or not all(
        isinstance(place, Placement) for place in placements
    ):
        raise TypeError(
            f"{what} needs placements such as (Replicate(), Shard(0)), got {placements!r}"
        )
    if len(placements) != len(sizes):
        raise ValueError(
            f"{what} needs one placement for each of the mesh dimensions {', '.join(dims)}, "
            f"got {len(placements)}"
        )
    parts = [1] * len(shape)
    for place, size in zip(placements, sizes, strict=True):
        if isinstance(place, Partial) or not isinstance(place, (Shard, Replicate)):
            raise ValueError(f"{what} must be Shard or Replicate, got {place}")
        if isinstance(place, Shard):
            if not -len(shape) <= place.dim < len(shape):
                raise ValueError(
                    f"{what} has the shape {tuple(shape)}, which has no dim {place.dim} to shard"
                )
            parts[place.dim] *= size
    for dim, (length, part) in enumerate(zip(shape, parts, strict=True)):
        if length % part:
            raise ValueError(
                f"{what} has {length} elements in dim {dim}, which {part} ranks do not divide"
            )
    return tuple(
        Shard(place.dim % len(shape)) if isinstance(place, Shard) else Replicate()
        for place in placements
    )


def _show_placement(place: Any) -> str:
    return f"S({place.dim})" if isinstance(place, Shard) else "R"


def _read_placement(text: str) -> Any:
    return Replicate() if text == "R" else Shard(int(text.removeprefix("S(").removesuffix(")")))
