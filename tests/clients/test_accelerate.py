"""A loop of one's own with accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LEARNING_RATE, STEPS, Trained, Trial, batches, whole
from outcomes import Table
from test_trainer import shard_on_cpu
from torch import nn


def train(model: nn.Module, precision: str = "no", fsdp: bool = False, every: int = 1) -> Trained:
    """Train by accelerate, which spreads the batches of all ranks; a step after ``every`` batch."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin: Any = None
    if fsdp:
        shard_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=every,
    )
    assert accelerator.is_fsdp2 == fsdp
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for ids in batches(accelerator.process_index, accelerator.num_processes):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    return Trained(losses, {name: whole(each).clone() for name, each in state.items()})


ONE = {
    "plain": Trial(train),
    "gradient accumulation": Trial(train, {"every": 2}),
    "bf16 autocast": Trial(
        train, {"precision": "bf16"}, exactly={"precision": "no"}, dtype=torch.bfloat16
    ),
}
TWO = {"DDP": Trial(train), "FSDP2": Trial(train, {"fsdp": True})}


@pytest.mark.parametrize("mode", ONE)
def test_one_process(mode: str, table: Table) -> None:
    assert STEPS % 2 == 0
    table.compare(ONE[mode], "accelerate", mode)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", TWO)
def test_two_processes(mode: str, table: Table) -> None:
    table.compare(TWO[mode], "accelerate", mode, processes=2)
