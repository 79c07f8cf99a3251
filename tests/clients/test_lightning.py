"""Lightning's Trainer and Fabric."""

from __future__ import annotations

import tempfile

import lightning
import pytest
import torch
from harness import LEARNING_RATE, STEPS, Trained, Trial, batches, weights
from outcomes import Table
from torch import nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """A language model that keeps its losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)


def by_trainer(model: nn.Module, processes: int = 1, precision: str = "32-true") -> Trained:
    module = Module(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            precision=precision,
            max_steps=STEPS,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        assert trainer.world_size == processes
        mine = batches(trainer.global_rank, processes)
        trainer.fit(module, DataLoader(mine, batch_size=None))
    return Trained(module.losses, weights(model))


def by_fabric(model: nn.Module, processes: int = 1, precision: str = "32-true") -> Trained:
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        precision=precision,
    )
    fabric.launch()
    assert fabric.world_size == processes
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    wrapped, optimizer = fabric.setup(model, optimizer)
    losses = []
    for ids in batches(fabric.global_rank, processes):
        loss = wrapped(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, weights(model))


EXACT = {"precision": "64-true"}
BF16 = {"precision": "bf16-mixed"}
LOOPS = {"Trainer": by_trainer, "Fabric": by_fabric}


@pytest.mark.parametrize("loop", LOOPS)
def test_one_process(loop: str, table: Table) -> None:
    table.compare(Trial(LOOPS[loop], exactly=EXACT), "lightning", loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_bf16(loop: str, table: Table) -> None:
    trial = Trial(LOOPS[loop], BF16, exactly=EXACT, dtype=torch.bfloat16)
    table.compare(trial, "lightning", f"{loop}, bf16-mixed")


@pytest.mark.distributed
@pytest.mark.parametrize("loop", LOOPS)
def test_ddp(loop: str, table: Table) -> None:
    trial = Trial(LOOPS[loop], {"processes": 2}, exactly=EXACT)
    table.compare(trial, "lightning", f"{loop}, DDP", processes=2)
