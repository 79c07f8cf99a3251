"""torch's pipeline schedules over two processes, zero-bubble ones among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BATCH, LEARNING_RATE, STEPS, Trained, Trial, batches, weights
from outcomes import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

LAYERS = 4
MICROBATCHES = 4


class Stage(nn.Module):
    """Consecutive layers of a Llama, with its embeddings if they are the first, and its head."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        inner, size = model.model, LAYERS // count
        self.embed = inner.embed_tokens if index == 0 else None
        self.layers = inner.layers[index * size : (index + 1) * size]
        self.rotary = inner.rotary_emb
        self.tail = nn.Sequential(inner.norm, model.lm_head) if index == count - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        positions = torch.arange(hidden.shape[1])[None]
        tables = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=tables)
        return hidden if self.tail is None else self.tail(hidden)


def train(model: nn.Module, schedule: str) -> Trained:
    dist.init_process_group("gloo")
    try:
        return _train(model, schedule, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _train(model: nn.Module, schedule: str, rank: int, ranks: int) -> Trained:
    mine = _stages(schedule, rank, ranks)
    count = ranks * len(mine)
    stages = [
        PipelineStage(Stage(model, index, count), index, count, torch.device("cpu"))
        for index in mine
    ]
    make: Any = getattr(schedules, f"Schedule{schedule}")
    runs = make(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=_loss)
    held = nn.ModuleList(stage.submod for stage in stages)
    optimizer = torch.optim.SGD(held.parameters(), lr=LEARNING_RATE)
    last = count - 1 in mine
    owner = next(each for each in range(ranks) if count - 1 in _stages(schedule, each, ranks))
    losses = []
    for ids in batches():
        parts: list[torch.Tensor] = []
        wanted = {"target": ids.roll(-1, 1), "losses": parts} if last else {}
        runs.step(*([ids] if 0 in mine else []), **wanted)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(parts).mean() if last else torch.zeros((), dtype=_dtype(model))
        dist.broadcast(loss.detach(), owner)
        losses.append(loss.item())
    return Trained(losses, weights(held))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _stages(schedule: str, rank: int, ranks: int) -> tuple[int, ...]:
    if schedule == "1F1B":
        return (rank,)
    return (rank, 2 * ranks - 1 - rank if "ZBV" in schedule else rank + ranks)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_schedule(schedule: str, table: Table) -> None:
    assert BATCH == MICROBATCHES and STEPS > 1
    per_layer = ("attention", "rotary_embedding", "linear_glu")
    # Half of the layers on each rank. Forward calls: a zero-bubble schedule asks a backward twice.
    ops = dict.fromkeys(per_layer, LAYERS // 2)
    trial = Trial(
        train,
        {"schedule": schedule},
        config={"num_hidden_layers": LAYERS},
        ops=ops,
        suffix="",
        backwards=STEPS * MICROBATCHES + 1,  # the first is a stage's, to learn its shapes
    )
    table.compare(trial, "torch", f"pipeline {schedule}", processes=2)
