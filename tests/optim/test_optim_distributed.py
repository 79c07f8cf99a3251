"""Optimizers over DTensors, FSDP2 and DDP: the bits of one process, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from comparing import assert_same_bits
from one_process import full_tensor
from optim_testing import TinyModel, parameters, set_gradients
from run_ranks import World
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fusedops.optim import AdamW, OffloadedAdamW

pytestmark = pytest.mark.distributed

OnRanks = Callable[..., list[Any]]
each_kind = pytest.mark.parametrize("kind", ["adamw", "late", "overlapped"])
ROUNDED: dict[str, Any] = {"state_dtype": torch.bfloat16, "max_norm": 0.5, "skip_non_finite": True}
SHAPES = ((12, 10), (7,), (9, 4, 6), (33, 3))
STATES = ("exp_avg", "exp_avg_sq")
MASTERS = {"master_weights": True}
CLIPPED = MASTERS | {"max_norm": 0.5, "lr": 1e-2, "no_decay": ("*.3.*",)}
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
    small: dict[str, Any] = {"bucket_bytes": 300, "threads": 1}
    return OffloadedAdamW(params, overlap=kind == "overlapped", **small, **options)


def outcome(optimizer: AdamW) -> list[Any]:
    """Return what was stepped, and the norm; ends the threads of an offloaded optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [
        [full_tensor(each) for each in (param, *(optimizer.state[param][name] for name in STATES))]
        for param in params
        if optimizer.state[param].get("step", 0)
    ]
    norm = optimizer.grad_norm
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.close()
    return [found, None if norm is None else norm.float()]


def masters_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    """Return the master weights, unsharded."""
    return [full_tensor(optimizer.state[param]["master"]) for param in model.parameters()]


def placed_steps(world: World, kind: str, layout: str, options: dict[str, Any]) -> Any:
    """Step parameters that are sharded in some way, and whole ones with the same gradients."""
    shape, placements = PLACEMENTS[layout]
    ranks = torch.arange(torch.tensor(shape).prod()).view(shape)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dim0", "dim1")[: len(shape)])
    if world.rank >= ranks.numel():
        return None
    plain = parameters(shapes=SHAPES)
    sharded = []
    for param in plain:
        fitting = [
            place if isinstance(place, Replicate) or place.dim < param.dim() else Replicate()
            for place in placements
        ]
        sharded.append(nn.Parameter(distribute_tensor(param.detach(), mesh, fitting)))
    both = [
        make(kind, [(f"p{i}", param) for i, param in enumerate(params)], **options)
        for params in (sharded, plain)
    ]
    for step in range(3):
        set_gradients(plain, step)
        for param, whole in zip(sharded, plain, strict=True):
            assert whole.grad is not None
            param.grad = distribute_tensor(whole.grad, mesh, param.placements)
        for optimizer in both:
            optimizer.step()
    return [outcome(optimizer) for optimizer in both]


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Let FSDP2 shard a model by its layers."""
    for layer in model.layers[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.layers, mesh=mesh)


def train(
    model: Any,
    kind: str,
    options: dict[str, Any],
    mesh: DeviceMesh | None = None,
) -> AdamW:
    """Train on the same batches in every process: their mean is each one's.

    Some weights are halved after the first step, and master weights must follow.
    """
    if mesh is not None:
        shard(model, mesh)
    optimizer = make(kind, model.named_parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                for param in list(model.parameters())[:2]:
                    param.mul_(0.5)
    return optimizer


def fsdp_steps(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train under FSDP2 on four ranks, and alone."""
    mesh = DeviceMesh("cpu", list(range(4)))
    if world.rank >= 4:
        return None
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    models = [TinyModel(dtype) for _ in range(2)]
    sharded, alone = (
        train(model, kind, options, mesh) for model, mesh in zip(models, (mesh, None), strict=True)
    )
    return outcome(sharded), outcome(alone)


def ddp_steps(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train under DDP on two ranks with different batches."""
    if not world.member(2):
        return None
    model = TinyModel(torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(
        model.layers, process_group=world.groups[2], bucket_cap_mb=1
    )
    optimizer = make(kind, wrapped.named_parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(10 * step + world.rank)
        wrapped(torch.randn(4, 13, generator=made)).square().mean().backward()
        optimizer.step()
    return outcome(optimizer)


def checkpoint(world: World, kind: str, folder: str) -> Any:
    """Save on four ranks; load on two into ours and into torch's AdamW.

    Returns what was saved, of four ranks, and what was loaded, of two: moments and masters.
    """
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 2)}
    saved: list[Any] = []
    loaded: list[Any] = []
    if world.rank < 4:
        model = TinyModel()
        optimizer = train(model, kind, MASTERS, meshes[4])
        state = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": state}, checkpoint_id=folder, process_group=world.groups[4])
        masters = masters_of(optimizer, model)
        saved = [[moments for _, *moments in outcome(optimizer)[0]], masters]
    torch.distributed.barrier()
    for name in (kind, "torch") if world.rank < 2 else ():
        model = TinyModel()
        shard(model, meshes[2])
        params = model.named_parameters()
        other: Any = torch.optim.AdamW(params) if name == "torch" else make(kind, params, **MASTERS)
        state = get_optimizer_state_dict(model, other)
        dcp.load({"optimizer": state}, checkpoint_id=folder, process_group=world.groups[2])
        set_optimizer_state_dict(model, other, optim_state_dict=state)
        moments = [[full_tensor(other.state[p][key]) for key in STATES] for p in model.parameters()]
        loaded.append([moments, [] if name == "torch" else masters_of(other, model)])
        if isinstance(other, OffloadedAdamW):
            other.close()
    torch.distributed.barrier()
    return saved, loaded


def tensor_parallel(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train a tensor-parallel model whose norm has rows of its own on each rank.

    Returns what the optimizer made of the DTensors, what AdamW made of plain tensors with the same
    gradients, and how many buckets were begun in the last backward.
    """
    if world.rank >= 2:
        return None
    model, whole = TinyModel(torch.float32), TinyModel(torch.float32)
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0),
        "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model.layers, DeviceMesh("cpu", [0, 1]), plan)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    optimizer = make(kind, model.named_parameters(), **options)
    reference = AdamW(whole.named_parameters(), master_weights=True, **options)
    begun = 0
    for step in range(4):
        optimizer.zero_grad()
        model.loss(step).backward()
        if isinstance(optimizer, OffloadedAdamW):
            begun = sum(bucket.job is not None for bucket in optimizer._buckets)
        for plain, param in zip(whole.parameters(), model.parameters(), strict=True):
            plain.grad = full_tensor(param.grad)
        optimizer.step()
        reference.step()
    return outcome(optimizer), outcome(reference), begun


@pytest.mark.ci(every=2)
@each_kind
@pytest.mark.parametrize("layout", PLACEMENTS)
def test_shards_do_not_show(on_ranks: OnRanks, kind: str, layout: str) -> None:
    results = on_ranks(placed_steps, kind, layout, ROUNDED)
    members = [result for result in results if result is not None]
    assert len(members) in (2, 4)
    for sharded, whole in members:
        assert_same_bits(sharded, whole)


@pytest.mark.ci(every=5)
@each_kind
@pytest.mark.parametrize(
    "options", [{}, ROUNDED, MASTERS, CLIPPED], ids=["plain", "rounded", "masters", "clipped"]
)
def test_fsdp2_gives_the_bits_of_one_process(
    on_ranks: OnRanks, kind: str, options: dict[str, Any]
) -> None:
    for sharded, alone in on_ranks(fsdp_steps, kind, options)[:4]:
        assert_same_bits(sharded, alone)


def test_ddp_steps_with_the_reduced_gradients(on_ranks: OnRanks) -> None:
    options = {"max_norm": 0.5}
    expected = on_ranks(ddp_steps, "adamw", options)[0]
    for kind in ("late", "overlapped"):
        for answer in on_ranks(ddp_steps, kind, options)[:2]:
            assert_same_bits(answer, expected)


@each_kind
@pytest.mark.parametrize("options", [{}, ROUNDED], ids=["plain", "rounded"])
def test_tensor_parallel_modules_step_as_whole_ones(
    on_ranks: OnRanks, kind: str, options: dict[str, Any]
) -> None:
    for found, expected, begun in on_ranks(tensor_parallel, kind, options)[:2]:
        assert_same_bits(found, expected)
        assert bool(begun) == (kind == "overlapped")


@each_kind
def test_checkpoints_of_other_meshes_and_of_torch(
    on_ranks: OnRanks, kind: str, tmp_path: Path
) -> None:
    results = on_ranks(checkpoint, kind, str(tmp_path / "saved"))
    moments, masters = results[0][0]
    for _, (ours, stock) in results[:2]:
        assert_same_bits(ours, [moments, masters])
        assert_same_bits(stock[0], [[each.bfloat16() for each in pair] for pair in moments])
