"""``ShardingPlan``: where the parameters of a model are, what that costs, and how to run it so.

A plan can be printed, edited, and applied to a model.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fusedops._core import checks
from fusedops.nn.vectors import pattern_of
from fusedops.planner.sharding.cost import COLLECTIVES, Placements
from fusedops.planner.sharding.run import TracedModel, apply_placements
from fusedops.terminal.sizes import show_bytes, show_count

_OP = "ShardingPlan"


@dataclass(eq=False)
class ShardingPlan:
    """Placements of all parameters of a model on a mesh; made by ``auto_parallel``.

    ``str(plan)`` is a table. ``plan[pattern] = placements`` changes a plan, before it is applied.

    Attributes:
        mode: the mode of ``auto_parallel``.
        mesh: where the plan runs.
        placements: a placement for each mesh dimension, by name of the parameter.
        exact: whether the search has compared all options.
        traced: the graph of the model, with its costs.
        replicated_calls: operators without a rule that run on replicated tensors, with how often.
        memory: bytes of a rank: parameters, gradients, AdamW's states, buffers, saved activations.
        sent: bytes that a rank sends in a step, by collective.
        seconds: of a step, an estimate.
    """

    mode: str
    mesh: DeviceMesh
    placements: dict[str, Placements]
    exact: bool
    traced: TracedModel
    replicated_calls: dict[str, int] = field(init=False)
    memory: float = field(init=False)
    sent: dict[str, float] = field(init=False)
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        cost, self.memory, self.replicated_calls = self.traced.evaluator.total_of(self.placements)
        self.sent = {kind: n for kind, n in zip(COLLECTIVES, cost.sent, strict=True) if n}
        self.seconds = cost.seconds

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
            shape = self.traced.evaluator.parameters[name].shape
            places[name] = checked_placements(f"{_OP}: {name}", placements, shape, self.mesh)
        self.placements.update(places)
        self.__post_init__()

    def __str__(self) -> str:
        """Return the plan as a table, with totals."""
        parameters, sizes = self.traced.evaluator.parameters, self.mesh.shape
        groups: dict[Any, list[str]] = {}
        for name, places in self.placements.items():
            shape = " x ".join(map(str, parameters[name].shape)) or "scalar"
            key = (pattern_of(name), shape, ", ".join(map(_show_placement, places)))
            groups.setdefault(key, []).append(name)
        rows = [("parameter", "count", "shape", "placements", "bytes per rank")]
        for (pattern, shape, text), names in groups.items():
            costs = self.traced.evaluator.placer.costs
            own = (costs.local_bytes(parameters[n].nbytes, self.placements[n]) for n in names)
            rows.append((pattern, str(len(names)), shape, text, show_bytes(int(sum(own)))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        dims = zip(self.mesh.mesh_dim_names or (), map(str, sizes), strict=True)
        count = sum(math.prod(parameter.shape) for parameter in parameters.values())
        sent = [f"{kind} {show_bytes(int(n))}" for kind, n in self.sent.items()]
        lines = [
            f"{self.mode} on {' x '.join(map(' '.join, dims))} ({self.mesh.device_type})",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            f"{show_count(count)} parameters; {show_bytes(int(self.memory))} per rank",
            f"sent per step and rank: {', '.join(sent) or 'nothing'}",
            f"estimated seconds per step: {self.seconds:.3g}",
        ]
        if self.replicated_calls:
            calls = ", ".join(f"{n} x {name}" for name, n in self.replicated_calls.items())
            lines.append(f"on replicated tensors, for lack of a rule: {calls}")
        if not self.exact:
            lines.append("the search has left options out: another plan may be faster")
        return "\n".join(lines)

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
        return apply_placements(model, self.mesh, self.placements, self.traced)


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
    what: str, placements: Any, shape: Sequence[int], mesh: DeviceMesh
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
    if len(placements) != mesh.ndim:
        dims = ", ".join(mesh.mesh_dim_names or ())
        raise ValueError(
            f"{what} needs one placement for each of the mesh dimensions {dims}, "
            f"got {len(placements)}"
        )
    parts = [1] * len(shape)
    for place, size in zip(placements, mesh.shape, strict=True):
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
