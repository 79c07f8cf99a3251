"""DeepSpeed's ZeRO on two processes: by its engine, by our socket, by transformers' Trainer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from causal_families import DENSE
from harness import LEARNING_RATE, OPS, Trained, Trial, batches, steps
from outcomes import Table
from test_trainer import compile_nothing, gathered, zero
from test_trainer import train as by_trainer
from torch import nn

from fusedops.integrations import deepspeed as socket

# How the socket patches a model, at which stages of ZeRO.
WAYS = {"initialize": (0, 1, 2, 3), "engine": (1, 3), "unpatched": (1, 3)}


def train(model: nn.Module, stage: int, way: str = "", fused: bool = False) -> Trained:
    import deepspeed

    compile_nothing()
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    initialize = socket.initialize if fused and way == "initialize" else deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=optimizer, config=zero(stage))
    if fused and way != "initialize":
        socket.patch(engine)
    if fused and way == "unpatched":
        socket.unpatch(engine)
    losses = steps(engine, batches(rank, processes), engine.backward, engine)
    return Trained(losses, gathered(model))


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engine(stage: int, table: Table) -> None:
    # The engine trains in float32 what is not half precision: no float64.
    trial = Trial(train, {"stage": stage}, exactly=None)
    table.compare(trial, "deepspeed", f"ZeRO {stage}", processes=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "stage"), [(way, stage) for way, stages in WAYS.items() for stage in stages]
)
def test_the_socket_patches_the_model_or_its_engine(way: str, stage: int) -> None:
    ops: dict[str, Any] = dict.fromkeys(OPS, 0) if way == "unpatched" else OPS
    options = {"stage": stage, "way": way}
    Trial(train, options, exactly=None, ops=ops, by_socket=True).compare(processes=2)


def test_what_is_no_model_and_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        socket.initialize(model={}, config={})
    for function in (socket.patch, socket.unpatch):
        with pytest.raises(TypeError, match="DeepSpeedEngine"):
            function(DENSE["Llama"].model())


@pytest.mark.distributed
def test_trainer(table: Table) -> None:
    trial = Trial(by_trainer, {"deepspeed": zero(3)}, exactly=None)
    table.compare(trial, "deepspeed", "ZeRO 3 by transformers' Trainer", processes=2)
