"""``auto_parallel``: placements for the parameters of any model on a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.planner.device import Device, load_device
from fusedops.planner.sharding.apply import evaluator_for
from fusedops.planner.sharding.cost import COLLECTIVES, MeshCosts, Placements, StepCost
from fusedops.planner.sharding.evaluate import Evaluator
from fusedops.planner.sharding.execute import call_key
from fusedops.planner.sharding.inputs import DATA_NAMES, batch_of, data_dims
from fusedops.planner.sharding.placements import checked_placements, matching_names
from fusedops.planner.sharding.plan import (
    PlannedParameter,
    PlanTotals,
    ShardingPlan,
    parameters_of,
)
from fusedops.planner.sharding.solver import Solution, solve, units_of
from fusedops.planner.sharding.strategies import StepPlacement
from fusedops.planner.sharding.trace import OP, FakeModel
from fusedops.planner.sizes import show_bytes

MODES = ("auto", "data", "semi-auto", "hybrid")
_ATTEMPTS = 4


def auto_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    mode: str = "auto",
    memory_limit: int | None = None,
    marked: Mapping[str, Placement | Sequence[Placement]] | None = None,
    device: str | Device = "h100",
) -> ShardingPlan:
    """Plan where the parameters of a model are on a mesh; nothing runs and nothing is changed.

    The model is traced by ``torch.export`` on fake tensors. Where a parameter's placement leads to
    communication follows from DTensor's sharding rules and those of fused operators.

    Args:
        model: any module, in the mode (train or eval) in which it will run.
        mesh: one or two named dimensions. The batch is sharded on those that are named ``dp`` or
            ``data``; parameters may be sharded on the others.
        example_inputs: positional arguments (a tuple) or keyword arguments (a dict) of the model,
            with the global batch in dim 0. Only shapes and dtypes of tensors are read.
        mode: ``"data"`` shards the batch only; ``"auto"`` searches the fastest placements;
            ``"semi-auto"`` keeps ``marked`` and chooses the others for the fewest communicated
            bytes; ``"hybrid"`` keeps ``marked`` and searches the others.
        memory_limit: the most bytes per rank, of parameters, gradients, AdamW's states, buffers
            and saved activations. With a limit parameters may also be sharded over the batch's
            dimension; they are gathered for each forward.
        marked: placements by name of a parameter or module; ``*`` matches anything. A module's
            placements are those of its parameters: replicated where they lack the dim.
        device: what each rank is, for the estimates: a name of ``known_devices()`` or a
            ``Device``.

    Returns:
        The plan, whose ``apply`` makes the model run on the mesh.

    Raises:
        TypeError: the model, the mesh or a placement is something else.
        ValueError: the mesh has more than two dimensions or no names, the batch cannot be divided,
            a name is unknown, a size cannot be divided, or nothing fits the limit.
        UnsupportedError: the model cannot be exported (and the mode is not ``"data"``).

    Example:
        >>> import fusedops, torch
        >>> from torch import distributed, nn
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> x = torch.randn(4, 8)
        >>> plan = fusedops.auto_parallel(model, mesh, (x,), memory_limit=6000)
        >>> plan["0.weight"], plan["2.weight"]
        ((Shard(dim=0),), (Shard(dim=1),))
        >>> distributed.destroy_process_group()
    """
    args, kwargs = _inputs(example_inputs)
    _check(model, mesh, mode, memory_limit, marked)
    batch_of(args, kwargs, mesh)
    device = load_device(device) if isinstance(device, str) else device
    names = tuple(mesh.mesh_dim_names or ())
    parameters = parameters_of(model)
    fixed = _fixed(model, parameters, mesh, marked or {})
    evaluator = None
    if mode != "data" or not _has_batch_norm(model):
        try:
            fake = FakeModel(model, mesh.device_type)
            evaluator = evaluator_for(fake, mesh, device, args, kwargs)
        except UnsupportedError:
            if mode != "data":
                raise
    replicated = dict.fromkeys(parameters, tuple(Replicate() for _ in names))
    if mode == "data":
        result = Solution(replicated, True)
    else:
        assert evaluator is not None
        result = _searched(evaluator, fixed, mode, memory_limit)
    placements = {name: result.placements.get(name, replicated[name]) for name in parameters}
    placements.update(fixed)
    estimate = _Estimate(evaluator, parameters, MeshCosts(mesh, device), model, names)
    plan = ShardingPlan(
        mode=mode,
        mesh_shape=tuple(mesh.shape),
        mesh_dims=names,
        device_type=mesh.device_type,
        parameters=parameters,
        placements=placements,
        batch=batch_of(args, kwargs, mesh),
        local=evaluator is None,
        exact=result.exact,
        replicated_calls=estimate.replicated_calls(placements),
        mesh=mesh,
        totals=estimate(placements),
        estimate=estimate,
    )
    if evaluator is not None:
        plan.traced = (call_key(model, args, kwargs)[1], evaluator)
    if memory_limit is not None and plan.totals.memory > memory_limit:
        raise ValueError(_too_large(plan.totals.memory, memory_limit, mode))
    return plan


def _inputs(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise checks.fail_type(OP, "example_inputs", "a tuple or a dict of tensors", example)


def _check(
    model: Any, mesh: Any, mode: Any, memory_limit: Any, marked: Mapping[str, Any] | None
) -> None:
    if not isinstance(model, nn.Module):
        checks.fail_type(OP, "model", "a torch.nn.Module", model)
    if not isinstance(mesh, DeviceMesh):
        checks.fail_type(OP, "mesh", "a DeviceMesh", mesh)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{OP}: {name} is a DTensor already: plan for the plain model")
    names = mesh.mesh_dim_names
    if not names or mesh.ndim > 2:
        checks.fail(
            OP,
            "mesh",
            'of one or two named dimensions, as mesh_dim_names=("dp", "tp")',
            f"{mesh.ndim} dimensions with the names {names}",
        )
    checks.choice(OP, "mode", mode, MODES)
    if mode == "data" and not data_dims(tuple(names)):
        raise ValueError(
            f'{OP}: mode "data" needs a mesh dimension named {" or ".join(DATA_NAMES)}, '
            f"got {', '.join(names)}"
        )
    if memory_limit is not None:
        checks.positive(OP, "memory_limit", memory_limit)
    if mode in ("semi-auto", "hybrid") and not marked:
        raise ValueError(f'{OP}: mode {mode!r} needs marked placements; mode "auto" needs none')
    if mode in ("auto", "data") and marked:
        raise ValueError(f'{OP}: mode {mode!r} ignores marked placements; use mode "hybrid"')


def _fixed(
    model: nn.Module,
    parameters: Mapping[str, PlannedParameter],
    mesh: DeviceMesh,
    marked: Mapping[str, Any],
) -> dict[str, Placements]:
    """Return the marked placements by name of the parameter."""
    fixed: dict[str, Placements] = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    modules = {name: module for name, module in model.named_modules() if name}
    sizes, dims = tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())
    for pattern, placements in marked.items():
        names = matching_names(f"{OP}: marked", pattern, {**aliases, **modules})
        for name in names:
            members = [name]
            if name not in aliases:
                members = [f"{name}.{own}" for own, _ in modules[name].named_parameters()]
            for member in members:
                parameter = aliases[member]
                shape = parameters[parameter].shape
                given = placements
                if name not in aliases and isinstance(placements, (tuple, list)):
                    given = tuple(_or_replicate(place, shape) for place in placements)
                fixed[parameter] = checked_placements(
                    f"{OP}: {parameter}", given, shape, sizes, dims
                )
    return fixed


def _or_replicate(place: Any, shape: Sequence[int]) -> Any:
    dim = getattr(place, "dim", None)
    return Replicate() if dim is not None and dim >= len(shape) else place


def _has_batch_norm(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        for module in model.modules()
    )


def _searched(
    evaluator: Evaluator,
    fixed: Mapping[str, Placements],
    mode: str,
    memory_limit: float | None,
) -> Solution:
    """Return the best placements; those that also shard over the batch only where a limit asks."""
    objective = "bytes" if mode == "semi-auto" else "seconds"
    best = solve(evaluator, units_of(evaluator, fixed, False), objective)
    assert best is not None
    if memory_limit is None or _memory(evaluator, best.placements) <= memory_limit:
        return best
    units, limit = units_of(evaluator, fixed, True), memory_limit
    for _ in range(_ATTEMPTS):
        result = solve(evaluator, units, objective, limit)
        if result is None:
            break
        excess = _memory(evaluator, result.placements) - memory_limit
        if excess <= 0:
            return result
        limit -= excess  # repeated layers may save what the search has not counted
    least = solve(evaluator, units, "memory")
    assert least is not None
    memory = _memory(evaluator, least.placements)
    if memory <= memory_limit:
        return least
    raise ValueError(_too_large(memory, memory_limit, mode))


def _memory(evaluator: Evaluator, placements: Mapping[str, Placements]) -> float:
    stored = {
        number: placements[name]
        for number, name in evaluator.graph.parameters.items()
        if name in placements
    }
    return evaluator.total(stored)[1]


def _too_large(memory: float, limit: float, mode: str) -> str:
    help_text = "a smaller batch or a mesh of more ranks"
    if mode == "data":
        help_text = f'mode "auto", which shards parameters, {help_text}'
    return (
        f"{OP}: the least that mode {mode!r} needs per rank is {show_bytes(math.ceil(memory))}, "
        f"more than the limit of {show_bytes(math.ceil(limit))}; what helps is {help_text}"
    )


class _Estimate:
    """Totals of placements by name; from the graph, or of the parameters alone."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        parameters: Mapping[str, PlannedParameter],
        costs: MeshCosts,
        model: nn.Module,
        names: tuple[str, ...],
    ) -> None:
        self._evaluator = evaluator
        self._parameters = parameters
        self._costs = costs
        self._buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        self._data = data_dims(names)

    def __call__(self, placements: Mapping[str, Placements]) -> PlanTotals:
        cost, memory = self._of_graph(placements) if self._evaluator else self._of_parameters()
        sent = {kind: n for kind, n in zip(COLLECTIVES, cost.sent, strict=True) if n}
        return PlanTotals(memory, sent, cost.seconds)

    def _of_graph(
        self,
        placements: Mapping[str, Placements],
        choices: list[StepPlacement] | None = None,
    ) -> tuple[StepCost, float]:
        assert self._evaluator is not None
        graph = self._evaluator.graph
        stored = {number: placements[name] for number, name in graph.parameters.items()}
        cost, memory = self._evaluator.total(stored, choices)
        used = set(graph.parameters.values())
        for name, parameter in self._parameters.items():
            if name not in used:
                nbytes = math.prod(parameter.shape) * parameter.itemsize
                memory += self._costs.local_bytes(nbytes, placements[name])
        return cost, memory

    def _of_parameters(self) -> tuple[StepCost, float]:
        cost, memory = StepCost(), float(self._buffers)
        for parameter in self._parameters.values():
            nbytes = math.prod(parameter.shape) * parameter.itemsize
            memory += nbytes * (4 if parameter.trained else 1)
            if parameter.trained:
                for dim in self._data:
                    cost += self._costs.collective("all-reduce", nbytes, dim)
        return cost, memory

    def replicated_calls(self, placements: Mapping[str, Placements]) -> dict[str, int]:
        """Return how often operators with gradients run on replicated tensors, by name."""
        calls: dict[str, int] = {}
        if self._evaluator is None:
            return calls
        choices: list[StepPlacement] = []
        self._of_graph(placements, choices)
        steps = [s for s in self._evaluator.graph.steps if self._evaluator.depends(s)]
        for step, choice in zip(steps, choices, strict=True):
            if choice.rule == "replicated" and choice.moves:
                name = step.op._schema.name.partition("::")[2]
                calls[name] = calls.get(name, 0) + 1
        return calls
