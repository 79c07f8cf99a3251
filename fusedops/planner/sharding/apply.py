"""Applying a plan: DTensor parameters, and a forward that runs with the plan's placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.planner.device import Device, load_device
from fusedops.planner.sharding.cost import MeshCosts, Placements
from fusedops.planner.sharding.evaluate import Evaluator
from fusedops.planner.sharding.execute import PlannedForward, call_key
from fusedops.planner.sharding.inputs import batch_of, data_dims
from fusedops.planner.sharding.local_forward import LocalForward
from fusedops.planner.sharding.strategies import Placer
from fusedops.planner.sharding.trace import OP, FakeModel


def evaluator_for(
    fake: FakeModel,
    mesh: DeviceMesh,
    device: Device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Evaluator:
    """Trace a model for inputs, and return the costs of its graph."""
    batch = batch_of(args, kwargs, mesh)
    graph = fake.trace(args, kwargs)
    costs = MeshCosts(mesh, device)
    placer = Placer(graph, mesh, costs, data_dims(tuple(mesh.mesh_dim_names or ())))
    return Evaluator(placer, batch)


def apply_placements(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Placements],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    local: bool,
    traced: tuple[Any, Evaluator] | None,
) -> nn.Module:
    """Distribute a model's parameters and replace its forward.

    Args:
        model: is changed.
        mesh: the mesh.
        placements: of the parameters, by name.
        shapes: that the parameters must have.
        local: whether to run the plain forward on each rank's rows, without a graph.
        traced: a graph that exists, with the kind of inputs that it is for.

    Returns:
        ``model``.

    Raises:
        ValueError: the model has other parameters.
    """
    _check(model, shapes)
    fake = None if local else FakeModel(model, mesh.device_type)
    seed = _agreed_seed(mesh)
    distributed: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        sharded = distribute_tensor(parameter.detach(), mesh, placements[name])
        distributed[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = distributed[id(old)]
    everywhere = [Replicate()] * mesh.ndim
    for buffer in model.buffers():
        if buffer.device.type != "meta":
            with torch.no_grad():
                first: Any = distribute_tensor(buffer.detach().clone(), mesh, everywhere)
                buffer.copy_(first.to_local())
    forward: Any
    if fake is None:
        forward = LocalForward(model, mesh, data_dims(tuple(mesh.mesh_dim_names or ())))
    else:
        evaluator_of = _tracer(model, mesh, fake, traced)
        forward = PlannedForward(model, evaluator_of, placements, mesh, seed)
    model.forward = forward
    return model


def _tracer(
    model: nn.Module, mesh: DeviceMesh, fake: FakeModel, traced: tuple[Any, Evaluator] | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Evaluator]:
    device = load_device("h100") if traced is None else traced[1].placer.costs.device

    def evaluator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evaluator:
        if traced is not None and traced[0] == call_key(model, args, kwargs)[1]:
            return traced[1]
        for own, other in zip(model.modules(), fake.module.modules(), strict=True):
            other.training = own.training
        return evaluator_for(fake, mesh, device, args, kwargs)

    return evaluator_of


def _check(model: nn.Module, planned: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{OP}: {name} is a DTensor already: apply a plan to a plain model")
        if name not in planned:
            near = checks.nearest(name, list(planned))
            hint = f", which has {near}" if near else ""
            raise ValueError(f"{OP}: the model has a parameter {name} that the plan lacks{hint}")
        if shapes[name] != planned[name]:
            raise ValueError(
                f"{OP}: {name} has the shape {shapes[name]}, in the plan {planned[name]}"
            )
    missing = [name for name in planned if name not in shapes]
    if missing:
        raise ValueError(f"{OP}: the plan has a parameter {missing[0]} that the model lacks")


def _agreed_seed(mesh: DeviceMesh) -> int:
    """Return the seed of the mesh's first rank, on all of its ranks."""
    seed = device_tensor([torch.initial_seed() % 2**62], torch.int64, mesh.device_type)
    agreed: Any = distribute_tensor(seed, mesh, [Replicate()] * mesh.ndim)
    return int(agreed.to_local())
