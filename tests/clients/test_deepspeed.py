"""DeepSpeed's ZeRO on two processes, by its engine and by transformers' Trainer."""

from __future__ import annotations

import os

import pytest
import torch
from harness import LEARNING_RATE, Trained, Trial, batches
from outcomes import Table
from test_trainer import compile_nothing, gathered, zero
from test_trainer import train as by_trainer
from torch import nn


def train(model: nn.Module, stage: int) -> Trained:
    import deepspeed

    compile_nothing()
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero(stage))
    losses = []
    for ids in batches(rank, processes):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Trained(losses, gathered(model))


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engine(stage: int, table: Table) -> None:
    # The engine trains in float32 what is not half precision: no float64.
    trial = Trial(train, {"stage": stage}, exactly=None)
    table.compare(trial, "deepspeed", f"ZeRO {stage}", processes=2)


@pytest.mark.distributed
def test_trainer(table: Table) -> None:
    trial = Trial(by_trainer, {"deepspeed": zero(3)}, exactly=None)
    table.compare(trial, "deepspeed", "ZeRO 3 by transformers' Trainer", processes=2)
