"""Policies and arenas on two ranks: steps under DDP, FSDP2 and in pipelines keep every bit.

Each recomputed forward runs twice, once in each direction, also where a zero-bubble schedule walks
a graph for inputs and for weights apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from one_process import full_tensor
from small_models import POLICIES, apply, encoder_loss, gpt2, language_loss
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedops
from fusedops import memory
from fusedops._core import extension

pytestmark = pytest.mark.distributed

STEPS = 4
LAYERS, MICROBATCHES, HIDDEN = 4, 4, 32
Result = tuple[list[torch.Tensor], int, float]


class Counted(nn.Module):
    """A layer of ours that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        sizes = HIDDEN, 2, 64
        self.layer = fusedops.nn.TransformerEncoderLayer(*sizes, dropout=0.1, batch_first=True)
        self.tail = nn.Linear(HIDDEN, HIDDEN)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.tail(self.layer(x)).tanh()  # torch detaches outputs of stages: no view


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Counted() for _ in range(LAYERS)]


def train(
    model: nn.Module,
    arena: Any,
    run: Callable[[], list[torch.Tensor]],
    seed: int,
    within: Callable[[], Any] = contextlib.nullcontext,
) -> Result:
    """Return losses and weights, the layers that ran in the last step, and the arena's share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counted = [layer for layer in model.modules() if isinstance(layer, Counted)]
    values = []
    for step in range(STEPS):
        for layer in counted:
            layer.runs = 0
        torch.manual_seed(seed + step)
        with within():
            values += run()
            optimizer.step()
            optimizer.zero_grad()
    share = 1.0
    if arena is not None:
        share = arena.report().served_bytes / arena.report().step_bytes
        arena.remove()
    values += map(full_tensor, model.parameters())
    return values, sum(layer.runs for layer in counted), share


def data_parallel(world: Any, change: str | None, wrap: str) -> Result:
    """Train under DDP or FSDP2; the change comes before the wrapper, or after it."""
    model: Any = gpt2(layers=2) if wrap == "gpt2" else nn.Sequential(*layers())
    modules, blocks = ("transformer.h.*", model.transformer.h) if wrap == "gpt2" else ("*", model)

    def prepare() -> Any:
        if change == "arena":
            return memory.use_arena(model)
        return change and apply(model, change, modules)

    arena = prepare() if wrap in ("ddp", "before fsdp") else None
    wrapped = model
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for block in blocks:
            # A norm that another layer reads is made again, and needs its weights then.
            fully_shard(block, reshard_after_forward=change != "by op")
        fully_shard(model)
        arena = arena if wrap == "before fsdp" else prepare()

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=wrap == "gpt2"):
            loss = language_loss(model) if wrap == "gpt2" else encoder_loss(wrapped, HIDDEN)
        loss.backward()
        return [loss.detach().clone()]

    return train(model, arena, run, seed=world.rank)


def pipeline(world: Any, change: str | None, schedule: str) -> Result:
    """Train two stages of a pipeline on each rank."""
    mine = [world.rank, world.rank + 2]
    if schedule == "ScheduleZBVZeroBubble":
        mine = [world.rank, LAYERS - 1 - world.rank]
    stages = {index: nn.Sequential(layer) for index, layer in enumerate(layers()) if index in mine}
    model = nn.ModuleList(stages.values())
    arena = memory.use_arena(model) if change == "arena" else None
    if change not in (None, "arena"):
        for stage in model:
            apply(stage, change)
    device = torch.device("cpu")
    steps = getattr(pipelining.schedules, schedule)(
        [pipelining.PipelineStage(stages[index], index, LAYERS, device) for index in mine],
        MICROBATCHES,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )

    def run() -> list[torch.Tensor]:
        x, target = torch.randn(2, 2 * MICROBATCHES, 8, HIDDEN)
        losses: list[torch.Tensor] = []
        ends = {"target": target, "losses": losses} if LAYERS - 1 in mine else {}
        steps.step(*((x,) if 0 in mine else ()), **ends)
        return [loss.detach().clone() for loss in losses]

    within = contextlib.nullcontext if arena is None else arena.step
    return train(model, arena, run, 0, within)


LAYOUTS: dict[str, tuple[int, Callable[..., Result], str]] = {
    # How many layers run forward in a step, and what a rank runs.
    **{wrap: (LAYERS, data_parallel, wrap) for wrap in ("ddp", "before fsdp", "after fsdp")},
    "gpt2": (0, data_parallel, "gpt2"),
    **{
        name: (2 * MICROBATCHES, pipeline, f"Schedule{name}")
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    },
}
PLAIN: dict[str, list[Result]] = {}
ARENA = pytest.param(
    "arena", marks=pytest.mark.skipif(extension.cpu_library() is not None, reason="not built")
)


@pytest.mark.ci(every=5)
@pytest.mark.parametrize("change", [*POLICIES, ARENA])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_steps_keep_their_bits(
    on_two_ranks: Callable[..., list[Any]], layout: str, change: str
) -> None:
    forwards, function, option = LAYOUTS[layout]
    if layout not in PLAIN:
        PLAIN[layout] = on_two_ranks(function, None, option)
    found = on_two_ranks(function, change, option)
    again = 2 if change in ("recompute", "selective", "both") else 1
    for (values, runs, share), (expected, usual, _) in zip(found, PLAIN[layout], strict=True):
        assert_same_bits(values, expected)
        assert usual == forwards and runs == again * forwards
        assert share > 0.3
