"""What the processes of ``test_optim_distributed.py`` run: each returns what one would compute."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
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


class Branches(nn.Module):
    """Layers of which each rank uses some, and nobody the last."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(2)
        self.first, self.left, self.right, self.idle = (nn.Linear(13, 13) for _ in range(4))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=made) / 4)

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        return (self.left if left else self.right)(self.first(x).tanh())


@dataclass
class Followed:
    """How DDP is used while the optimizer follows it, and how much then begins in the backward.

    Attributes:
        begins: share of the buckets of a step after the first that are begun in the backward and
            not made again.
        wrapper: options of DDP.
        passes: backwards before a step; the first ones under ``no_sync``, if ``skips``.
        skips: see ``passes``.
        hook: communication hook.
        dtype: of the model.
        branches: use ``Branches``.
        between: what happens to gradients before the step.
    """

    begins: float = 1.0
    wrapper: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    skips: bool = False
    hook: Any = None
    dtype: torch.dtype = torch.float32
    branches: bool = False
    between: Any = None


def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


FOLLOWED = {
    "plain": Followed(),
    "bucket views": Followed(wrapper={"gradient_as_bucket_view": True}),
    "static graph": Followed(wrapper={"static_graph": True}),
    "several passes": Followed(passes=2),
    "no_sync": Followed(passes=2, skips=True),
    "bfloat16": Followed(dtype=torch.bfloat16),
    "compressed": Followed(hook=default_hooks.fp16_compress_hook),
    # DDP reduces the zeros of `idle`, too; it has no gradient then, and its step is dropped.
    "branches": Followed(wrapper={"find_unused_parameters": True}, branches=True),
    "changed": Followed(0.0, between=_halve),
}


def followed(world: World, name: str) -> Any:
    """Train under DDP on three ranks, with a synchronous optimizer and one that follows DDP.

    Returns both outcomes, and the share of buckets that were begun in the backward and counted.
    """
    group = torch.distributed.new_group([0, 1, 2])
    if world.rank > 2:
        return None
    use = FOLLOWED[name]
    outcomes: list[Any] = []
    for kind in ("adamw", "overlapped"):
        model: Any = Branches() if use.branches else TinyModel(use.dtype).layers
        ddp = nn.parallel.DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=5e-4, **use.wrapper
        )
        optimizer = make(kind, ddp.named_parameters(), max_norm=1e6, master_weights=True)
        state = group if use.hook is not None else None
        begun = _Begun(optimizer) if isinstance(optimizer, OffloadedAdamW) else None
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.follow(ddp, use.hook, state)
        elif use.hook is not None:
            ddp.register_comm_hook(state, use.hook)
        for step in range(4):
            optimizer.zero_grad()
            for index in range(use.passes):
                made = torch.Generator().manual_seed(100 * step + 10 * index + world.rank)
                batch = torch.randn(4, 13, generator=made).to(use.dtype)
                silent = use.skips and index < use.passes - 1
                with ddp.no_sync() if silent else contextlib.nullcontext():
                    left = {"left": world.rank == 0} if use.branches else {}
                    ddp(batch, **left).float().square().mean().backward()
            if use.between is not None:
                use.between(ddp)
            if begun is not None:
                begun.backward_ends()
            optimizer.step()
            if begun is not None:
                begun.step_ends()
        outcomes.append(outcome(optimizer))
        assert len(outcomes[-1][0]) == (6 if use.branches else 8)
    assert begun is not None
    return *outcomes, begun.share


class _Begun:
    """Counts the buckets that an optimizer begins: in the backward, and in the step."""

    def __init__(self, optimizer: OffloadedAdamW) -> None:
        self._buckets = len(optimizer._buckets)
        self._count, self._shares = 0, []
        begin = optimizer._begin

        def note(*args: Any, **kwargs: Any) -> None:
            self._count += 1
            begin(*args, **kwargs)

        optimizer._begin = note  # type: ignore[method-assign]

    def backward_ends(self) -> None:
        self._early, self._count = self._count, 0

    def step_ends(self) -> None:
        self._shares.append((self._early - self._count) / self._buckets if self._early else 0.0)
        self._count = 0

    @property
    def share(self) -> float:
        """Of the last step: what was begun in the backward and not made again."""
        return self._shares[-1]


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
