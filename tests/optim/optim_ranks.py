"""What the processes of ``test_optim_distributed.py`` run: each returns what one would compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from offload_testing import TinyModel
from optim_testing import parameters, set_gradients
from process_pool import World
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fusedops.optim import AdamW, OffloadedAdamW, _overlap

SHAPES = ((12, 10), (7,), (9, 4, 6), (33, 3))
STATES = ("exp_avg", "exp_avg_sq")
PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "shard_0": ((4,), [Shard(0)]),
    "shard_1": ((2,), [Shard(1)]),
    "replicate": ((2,), [Replicate()]),
    "both_dims": ((2, 2), [Shard(0), Shard(1)]),
    "one_dim_twice": ((2, 2), [Shard(0), Shard(0)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
}


def make(kind: str, params: Any, **options: Any) -> AdamW:
    """Return an optimizer by name; offloaded ones with small buckets."""
    if kind == "adamw":
        return AdamW(params, **options)
    return OffloadedAdamW(
        params, bucket_bytes=300, threads=1, overlap=kind == "overlapped", **options
    )


def full(tensor: Any) -> torch.Tensor:
    """Return all of a tensor, whoever holds it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def outcome(optimizer: AdamW) -> list[Any]:
    """Return what was stepped, and the norm; ends the threads of an offloaded optimizer."""
    params = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if optimizer.state[param].get("step", 0)
    ]
    found = [
        [full(param), *(full(optimizer.state[param][name]) for name in STATES)] for param in params
    ]
    norm = optimizer.grad_norm
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.close()
    return [found, None if norm is None else norm.float()]


def sharded_steps(world: World, kind: str, layout: str, options: dict[str, Any]) -> Any:
    """Step parameters that are cut in some way, with gradients cut alike."""
    shape, placements = PLACEMENTS[layout]
    ranks = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    names = tuple(f"dim{i}" for i in range(len(shape)))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    if world.rank >= ranks.numel():
        return None
    plain = parameters(shapes=SHAPES)
    cut = []
    for param in plain:
        chosen = [
            placement
            if isinstance(placement, Replicate) or placement.dim < param.dim()
            else Replicate()
            for placement in placements
        ]
        cut.append(nn.Parameter(distribute_tensor(param.detach(), mesh, chosen)))
    optimizer = make(kind, [(f"p{i}", param) for i, param in enumerate(cut)], **options)
    for step in range(3):
        set_gradients(plain, step)
        for param, whole in zip(cut, plain, strict=True):
            assert whole.grad is not None
            param.grad = distribute_tensor(whole.grad, mesh, param.placements)
        optimizer.step()
    return outcome(optimizer)


def whole_steps(kind: str, options: dict[str, Any]) -> Any:
    """Return what ``sharded_steps`` gives, of one process."""
    params = parameters(shapes=SHAPES)
    optimizer = make(kind, [(f"p{i}", param) for i, param in enumerate(params)], **options)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    return outcome(optimizer)


def train(
    kind: str,
    options: dict[str, Any],
    *,
    wrap: Any = None,
    dtype: torch.dtype = torch.float32,
    after: Any = None,
) -> tuple[Any, nn.Module, AdamW]:
    """Train the tiny model on the same batches in every process: their mean is each one's."""
    model: Any = TinyModel(dtype)
    loss = model.loss
    if wrap is not None:
        model = wrap(model)
    optimizer = make(kind, model.named_parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        if after is not None:
            after(step, model)
    return optimizer, model, optimizer


def _fully_shard(model: TinyModel, mesh: DeviceMesh) -> TinyModel:
    for layer in (model.layers[0], model.layers[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model.layers, mesh=mesh)
    return model


def fsdp_steps(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train under FSDP2 on four ranks."""
    mesh = DeviceMesh("cpu", list(range(4)))
    if world.rank >= 4:
        return None
    return outcome(train(kind, options, wrap=partial(_fully_shard, mesh=mesh))[0])


def changed_steps(world: World, kind: str, shards: bool) -> Any:
    """Train with weights that are halved after a step, and count the parameters read per step."""
    mesh = DeviceMesh("cpu", list(range(4)))
    if world.rank >= 4:
        return None
    reads, read = [0], _overlap.read_parameter

    def count(*args: Any) -> bool:
        reads[-1] += 1
        return read(*args)

    def halve(step: int, model: nn.Module) -> None:
        reads.append(0)
        if step == 0:
            with torch.no_grad():
                for param in list(model.parameters())[:2]:
                    param.mul_(0.5)

    wrap = partial(_fully_shard, mesh=mesh) if shards else None
    with mock.patch.object(_overlap, "read_parameter", count):
        options = {"master_weights": True}
        trained = train(kind, options, wrap=wrap, dtype=torch.bfloat16, after=halve)
    return outcome(trained[0]), reads[:-1]


def alone(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train by itself: in a rank, for torch's products have other bits on more threads."""
    return outcome(train(kind, options)[0])


def ddp_steps(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train under DDP on two ranks with different batches."""
    if not world.member(2):
        return None
    model = TinyModel(torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(
        model.layers, process_group=world.groups[2], bucket_cap_mb=1
    )
    model.layers = wrapped  # type: ignore[assignment]
    optimizer = make(kind, model.named_parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(10 * step + world.rank)
        wrapped(torch.randn(4, 13, generator=made)).square().mean().backward()
        optimizer.step()
    return outcome(optimizer)


def checkpoint(world: World, kind: str, folder: str) -> Any:
    """Save on four ranks; load on two into ours and into torch's AdamW."""
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 2)}
    options = {"master_weights": True}

    def sharded(size: int, model: TinyModel | None = None) -> TinyModel:
        model = TinyModel(torch.bfloat16) if model is None else model
        fully_shard(model.layers, mesh=meshes[size])
        return model

    results: list[Any] = []
    if world.rank < 4:
        optimizer, model, _ = train(
            kind, options, wrap=lambda model: sharded(4, model), dtype=torch.bfloat16
        )
        saved = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": saved}, checkpoint_id=folder, process_group=world.groups[4])
        results.append(outcome(optimizer)[0])
        results.append([full(optimizer.state[p]["master"]) for p in model.parameters()])
    torch.distributed.barrier()
    if world.rank < 2:
        for name in (kind, "torch"):
            model = sharded(2)
            params = model.named_parameters()
            loaded: Any = (
                torch.optim.AdamW(params) if name == "torch" else make(kind, params, **options)
            )
            state = get_optimizer_state_dict(model, loaded)
            dcp.load({"optimizer": state}, checkpoint_id=folder, process_group=world.groups[2])
            set_optimizer_state_dict(model, loaded, optim_state_dict=state)
            results.append(
                [[full(loaded.state[p][name]) for name in STATES] for p in model.parameters()]
            )
            if name != "torch":
                results.append([full(loaded.state[p]["master"]) for p in model.parameters()])
            if isinstance(loaded, OffloadedAdamW):
                loaded.close()
    torch.distributed.barrier()
    assert Path(folder).exists()
    return results
