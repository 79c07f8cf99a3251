"""``auto_parallel``: placements for the parameters of any model on a mesh."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fusedops._core import checks
from fusedops.planner.device import Device, load_device
from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.evaluate import DATA_NAMES, Evaluator, data_dims, evaluator_for
from fusedops.planner.sharding.plan import ShardingPlan, checked_placements, matching_names
from fusedops.planner.sharding.run import TracedModel, call_key
from fusedops.planner.sharding.solver import Solution, solve, units_of
from fusedops.planner.sharding.trace import OP, FakeModel
from fusedops.terminal.sizes import show_bytes

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
    """Plan placements of small and medium models, whose full batch each rank can hold.

    One or two mesh dimensions are planned; nothing runs and nothing is changed. For large models
    use ``parallelize`` with ``fusedops plan``.

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
        UnsupportedError: the model cannot be exported.

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
    device = load_device(device) if isinstance(device, str) else device
    fake = FakeModel(model, mesh.device_type)
    evaluator = evaluator_for(fake, mesh, device, args, kwargs)
    fixed = _fixed(model, evaluator, mesh, marked or {})
    placements = dict.fromkeys(evaluator.parameters, evaluator.placer.replicated)
    exact = True
    if mode != "data":
        solution = _searched(evaluator, placements, fixed, mode, memory_limit)
        placements |= {**fixed, **solution.placements}
        exact = solution.exact
    key = call_key(model, args, kwargs)[1]
    plan = ShardingPlan(mode, mesh, placements, exact, TracedModel(fake, key, evaluator))
    if memory_limit is not None and plan.memory > memory_limit:
        raise ValueError(_too_large(plan.memory, memory_limit, mode))
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
        expected = 'of one or two named dimensions, as mesh_dim_names=("dp", "tp")'
        checks.fail(OP, "mesh", expected, f"{mesh.ndim} dimensions with the names {names}")
    checks.choice(OP, "mode", mode, MODES)
    if mode == "data" and not data_dims(mesh):
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
    model: nn.Module, evaluator: Evaluator, mesh: DeviceMesh, marked: Mapping[str, Any]
) -> dict[str, Placements]:
    fixed: dict[str, Placements] = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for pattern, placements in marked.items():
        for name in matching_names(f"{OP}: marked", pattern, aliases):
            shape, given = evaluator.parameters[aliases[name]].shape, placements
            of_module = not fnmatch.fnmatchcase(name, pattern)
            if of_module and isinstance(given, (tuple, list)):
                absent = [getattr(place, "dim", -1) >= len(shape) for place in given]
                given = [Replicate() if no else p for no, p in zip(absent, given, strict=True)]
            what = f"{OP}: {aliases[name]}"
            fixed[aliases[name]] = checked_placements(what, given, shape, mesh)
    return fixed


def _searched(
    evaluator: Evaluator,
    replicated: Mapping[str, Placements],
    fixed: Mapping[str, Placements],
    mode: str,
    memory_limit: float | None,
) -> Solution:
    """Return the best placements; those that also shard over the batch only where a limit asks."""
    objective = "bytes" if mode == "semi-auto" else "seconds"

    def memory_of(solution: Solution) -> float:
        return evaluator.total_of({**replicated, **fixed, **solution.placements})[1]

    best = solve(evaluator, units_of(evaluator, fixed, False), objective)
    assert best is not None
    if memory_limit is None or memory_of(best) <= memory_limit:
        return best
    units, limit = units_of(evaluator, fixed, True), memory_limit
    for _ in range(_ATTEMPTS):
        result = solve(evaluator, units, objective, limit)
        if result is None:
            break
        excess = memory_of(result) - memory_limit
        if excess <= 0:
            return result
        limit -= excess  # repeated layers may save what the search has not counted
    least = solve(evaluator, units, "memory")
    assert least is not None
    return least


def _too_large(memory: float, limit: float, mode: str) -> str:
    help_text = "a smaller batch or a mesh of more ranks"
    if mode == "data":
        help_text = f'mode "auto", which shards parameters, {help_text}'
    return (
        f"{OP}: the least that mode {mode!r} needs per rank is {show_bytes(math.ceil(memory))}, "
        f"more than the limit of {show_bytes(math.ceil(limit))}; what helps is {help_text}"
    )
