"""Lightning's Trainer and Fabric, by ``fusedops.patch`` and by the callback."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from families import DENSE
from harness import BATCH, LEARNING_RATE, STEPS, Table, Trained, Trial, batches, steps, weights
from torch import nn
from torch.utils.data import DataLoader

import fusedops
from fusedops import memory
from fusedops.integrations import describe
from fusedops.integrations.lightning import FusedOps
from fusedops.optim import AdamW, OffloadedAdamW

EXACT = {"precision": "64-true"}
BF16 = {"precision": "bf16-mixed"}
llama = DENSE["Llama"].model


class Module(lightning.LightningModule):
    """A language model that is built in one of the ways that Lightning knows."""

    def __init__(self, model: nn.Module, built_in: str = "__init__") -> None:
        super().__init__()
        self.given, self.built_in = [model], built_in
        self.losses: list[float] = []
        self._build("__init__")

    def _build(self, method: str) -> None:
        if self.built_in == method:
            (self.model,) = self.given

    def setup(self, stage: str) -> None:
        self._build("setup")

    def configure_model(self) -> None:
        self._build("configure_model")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss


def fit(
    module: Any,
    folder: str | Path,
    data: list[torch.Tensor] | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    """Return the trainer after ``fit``."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    always = {"accelerator": "cpu", "devices": 1, "max_steps": STEPS, **dict.fromkeys(quiet, False)}
    trainer = lightning.Trainer(default_root_dir=folder, **(always | options))
    loader = DataLoader(data or batches(), batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    assert "setup" not in vars(trainer.strategy)
    return trainer


def by_trainer(
    model: nn.Module,
    processes: int = 1,
    precision: str = "32-true",
    built_in: str = "__init__",
    fused: bool = False,
) -> Trained:
    module, callback = Module(model, built_in), FusedOps()
    mine = batches(int(os.environ.get("RANK", 0)), processes)
    strategy = "ddp" if processes > 1 else "auto"
    with tempfile.TemporaryDirectory() as folder:
        trainer = fit(
            module,
            folder,
            mine,
            devices=processes,
            strategy=strategy,
            precision=precision,
            use_distributed_sampler=False,
            callbacks=[callback] if fused else [],
        )
    assert trainer.world_size == processes
    if fused:
        assert callback.report is not None and callback.report["model.model.layers.0.mlp"].replaced
        assert describe(module).num_replaced == callback.report.num_replaced
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
    losses = steps(wrapped, batches(fabric.global_rank, processes), fabric.backward, optimizer)
    return Trained(losses, weights(model))


LOOPS = {"Trainer": by_trainer, "Fabric": by_fabric}
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "": ({}, 1),
    ", bf16-mixed": (BF16, 1),
    ", DDP": ({"processes": 2}, 2),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", LOOPS)
def test_training_is_that_of_the_stock_model(loop: str, mode: str, table: Table) -> None:
    options, processes = MODES[mode]
    dtype = torch.bfloat16 if options is BF16 else torch.float32
    trial = Trial(LOOPS[loop], options, exactly=EXACT, dtype=dtype)
    table.compare(trial, "lightning", f"{loop}{mode}", processes)


@pytest.mark.parametrize("built_in", ["__init__", "setup", "configure_model"])
def test_the_callback_patches_the_module_however_it_is_built(built_in: str) -> None:
    Trial(by_trainer, {"built_in": built_in}, exactly=EXACT, by_socket=True).compare()


@pytest.mark.distributed
def test_the_callback_under_distributed_data_parallel() -> None:
    Trial(by_trainer, {"processes": 2}, exactly=EXACT, by_socket=True).compare(processes=2)


def test_the_callback_patches_before_the_strategy_wraps(tmp_path: Path) -> None:
    seen: list[int] = []

    class Strategy(lightning.pytorch.strategies.SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            seen.append(describe(trainer.lightning_module).num_replaced)
            super().setup(trainer)

    callback = FusedOps(level="O1")
    module = Module(llama(), "configure_model")
    fit(module, tmp_path, callbacks=[callback], strategy=Strategy(device="cpu"))
    assert callback.report is not None and callback.report.level == "O1"
    assert seen == [callback.report.num_replaced] and seen[0] > 0


def test_the_callback_reports_once_and_unpatches_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for unpatch in (False, True):
        module, callback = Module(llama()), FusedOps(unpatch=unpatch)
        caplog.clear()
        with caplog.at_level("INFO"):
            fit(module, tmp_path, callbacks=[callback])
        printed = [message for message in caplog.messages if message == str(callback.report)]
        assert len(printed) == 1 and "linear_glu" in printed[0]
        assert (describe(module).num_replaced == 0) is unpatch


def test_the_callback_is_strict_and_has_a_level(tmp_path: Path) -> None:
    with pytest.raises(fusedops.UnsupportedError, match="strict"):
        fit(Module(nn.Tanh()), tmp_path, callbacks=[FusedOps(strict=True)])
    with pytest.raises(ValueError, match="level"):
        FusedOps(level="2")


class Scheduled(Module):
    """A patched language model, one of our optimizers and a schedule."""

    def __init__(self, make: Any, with_policy: bool) -> None:
        model = llama()
        fusedops.patch(model)
        if with_policy:
            memory.apply(model, memory.Policy(memory.recompute("model.layers.*")))
        super().__init__(model)
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.model.named_parameters(), lr=3e-3, no_decay=("*norm*",))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def scheduled(folder: Path, make: Any, with_policy: bool = False, **options: Any) -> Module:
    """Train, save a checkpoint, and return the module."""
    module = Scheduled(make, with_policy)
    trainer = fit(module, folder, **options)
    trainer.save_checkpoint(folder / "last.ckpt")
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()
    return module


def assert_same_bits(found: Module, expected: Module, losses: list[float]) -> None:
    assert found.losses == losses
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(mine, wanted) for mine, wanted in pairs)


@pytest.mark.parametrize(
    "options",
    [{}, BF16 | {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}],
    ids=["float32", "autocast and accumulation", "clipped by the trainer"],
)
def test_an_offloaded_optimizer_and_a_policy_train_as_the_plain_ones(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"max_steps": STEPS // options.get("accumulate_grad_batches", 1)} | options
    plain = scheduled(tmp_path, AdamW, **options)
    found = scheduled(tmp_path, OffloadedAdamW, with_policy=True, **options)
    assert_same_bits(found, plain, plain.losses)
    assert found.losses[-1] < found.losses[0] and len(found.losses) == STEPS


@pytest.mark.parametrize("make", [AdamW, OffloadedAdamW])
def test_it_goes_on_from_lightnings_checkpoint(make: Any, tmp_path: Path) -> None:
    # The same batch in each step: a plain loader does not resume where it was.
    half, same = STEPS // 2, [batches()[0]] * (STEPS // 2)
    assert same[0].shape[0] == BATCH
    complete = scheduled(tmp_path / "complete", make, data=same)
    scheduled(tmp_path, make, data=same, max_steps=half)
    rest = scheduled(tmp_path / "rest", make, data=same, resume=tmp_path / "last.ckpt")
    assert_same_bits(rest, complete, complete.losses[half:])
    assert len(rest.losses) == half
