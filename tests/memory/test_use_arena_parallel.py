"""Arenas under DDP, FSDP2, pipelines with several live micro-batches and compiled models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import encoder, encoder_loss
from torch import nn

from fusedops import memory
from fusedops._core import extension
from fusedops.memory.arena import StepArena

pytestmark = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="the compiled library is not built"
)
STEPS = 5
HIDDEN = 32


def _full(tensor: torch.Tensor) -> torch.Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach().clone()


def _train(model: nn.Module, owner: nn.Module, seed: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(seed + step)
        loss = encoder_loss(model)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(_full(parameter) for parameter in owner.parameters())]


def _share(arena: StepArena | None) -> float:
    if arena is None:
        return 1.0
    report = arena.report()
    arena.remove()
    return report.served_bytes / report.step_bytes


def under_ddp(world: Any, planned: bool) -> tuple[list[torch.Tensor], float]:
    from torch.nn.parallel import DistributedDataParallel

    model = encoder(layers=2)
    arena = memory.use_arena(model) if planned else None
    values = _train(DistributedDataParallel(model), model, world.rank)
    return values, _share(arena)


def under_fsdp(world: Any, planned: bool, first: bool) -> tuple[list[torch.Tensor], float]:
    from torch.distributed.fsdp import fully_shard

    model = encoder(layers=2)
    arena = memory.use_arena(model) if planned and first else None
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if planned and not first:
        arena = memory.use_arena(model)
    values = _train(model, model, world.rank)
    return values, _share(arena)


def in_a_pipeline(world: Any, planned: bool, schedule: str) -> tuple[list[torch.Tensor], float]:
    from torch.distributed import pipelining

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)]
    mine = [world.rank, 3 - world.rank] if schedule.startswith("ScheduleZBV") else []
    mine = mine or [world.rank, world.rank + 2]
    stages = [
        pipelining.PipelineStage(layers[index], index, 4, torch.device("cpu")) for index in mine
    ]
    run = getattr(pipelining.schedules, schedule)(
        stages, 4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    model = nn.ModuleList(layers[index] for index in mine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    arena = memory.use_arena(model) if planned else None
    values: list[torch.Tensor] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x, target = torch.randn(64, HIDDEN), torch.randn(64, HIDDEN)
        losses: list[torch.Tensor] = []
        ends = {"target": target, "losses": losses} if 3 in mine else {}
        if arena is None:
            run.step(*((x,) if 0 in mine else ()), **ends)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with arena.step():
                run.step(*((x,) if 0 in mine else ()), **ends)
                optimizer.step()
                optimizer.zero_grad()
        values += [loss.detach().clone() for loss in losses]
    return [*values, *(p.detach().clone() for p in model.parameters())], _share(arena)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("train", "options", "least"),
    [
        (under_ddp, (), 0.3),
        (under_fsdp, (True,), 0.3),
        (under_fsdp, (False,), 0.3),
        (in_a_pipeline, ("ScheduleInterleaved1F1B",), 0.5),
        (in_a_pipeline, ("ScheduleZBVZeroBubble",), 0.5),
    ],
    ids=["ddp", "arena before fsdp", "arena after fsdp", "1f1b", "zbv"],
)
def test_parallel_steps_keep_their_bits(
    on_two_ranks: Callable[..., list[Any]], train: Any, options: tuple[Any, ...], least: float
) -> None:
    plain = on_two_ranks(train, False, *options)
    planned = on_two_ranks(train, True, *options)
    for (values, share), (expected, _) in zip(planned, plain, strict=True):
        assert len(values) == len(expected) and all(map(torch.equal, values, expected))
        assert share > least


@pytest.mark.parametrize("first", [True, False], ids=["arena first", "compile first"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_steps_keep_their_bits(backend: str, first: bool) -> None:
    def run(planned: bool) -> tuple[list[torch.Tensor], float]:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        arena = memory.use_arena(model) if planned and first else None
        compiled: Any = torch.compile(model, backend=backend)
        if planned and not first:
            arena = memory.use_arena(compiled)
        values = _train(compiled, model, 0)
        return values, _share(arena)

    (values, share), (expected, _) = run(True), run(False)
    assert all(map(torch.equal, values, expected))
    assert share > 0.3
