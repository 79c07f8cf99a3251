"""The Lightning callback: patched before the strategy wraps, the losses of the stock module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from socket_testing import assert_same_losses, counted, llama, rows
from torch import nn

import fusedops

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import lightning.pytorch as lightning

from fusedops.integrations.lightning import FusedOps

pytestmark = pytest.mark.usefixtures("own_products")

STEPS = 10


class Module(lightning.LightningModule):
    """A language model that is built by one of the ways that Lightning knows."""

    def __init__(self, built_in: str = "__init__") -> None:
        super().__init__()
        self.built_in = built_in
        self.losses: list[float] = []
        self._build("__init__")

    def _build(self, method: str) -> None:
        if self.built_in == method:
            self.model = llama()

    def setup(self, stage: str) -> None:
        self._build("setup")

    def configure_model(self) -> None:
        self._build("configure_model")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss


def fit(module: Module, folder: Path, *callbacks: Any, strategy: Any = "auto") -> list[float]:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
    assert "setup" not in vars(trainer.strategy)
    return module.losses


@pytest.mark.parametrize("built_in", ["__init__", "setup", "configure_model"])
def test_a_fit_has_the_losses_of_the_stock_module(built_in: str, tmp_path: Path) -> None:
    expected = fit(Module(), tmp_path)
    module, callback = Module(built_in), FusedOps()
    with counted() as calls:
        found = fit(module, tmp_path, callback)
    assert calls["linear_glu_backward"] == 2 * STEPS and calls["cross_entropy_backward"] == STEPS
    assert callback.report is not None and callback.report["model.model.layers.0.mlp"].replaced
    assert fusedops.integrations.describe(module).num_replaced == callback.report.num_replaced
    assert_same_losses(found, expected)


def test_it_is_patched_when_the_strategy_wraps_it(tmp_path: Path) -> None:
    seen: list[int] = []

    class Strategy(lightning.strategies.SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            seen.append(fusedops.integrations.describe(trainer.lightning_module).num_replaced)
            super().setup(trainer)

    callback = FusedOps(level="O1")
    fit(Module("configure_model"), tmp_path, callback, strategy=Strategy(device="cpu"))
    assert callback.report is not None and callback.report.level == "O1"
    assert seen == [callback.report.num_replaced] and seen[0] > 0


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """Its sampler takes the rows in another order: the stock module has it too."""
    losses = []
    for callbacks in ([], [FusedOps()]):
        strategy = lightning.strategies.DDPStrategy(process_group_backend="gloo")
        with counted() as calls:
            losses.append(fit(Module(), tmp_path, *callbacks, strategy=strategy))
        torch.distributed.destroy_process_group()
    expected, found = losses
    assert calls["linear_glu_backward"] == 2 * STEPS
    assert_same_losses(found, expected)


def test_teardown_unpatches_if_asked(tmp_path: Path) -> None:
    for unpatch in (False, True):
        module = Module()
        fit(module, tmp_path, FusedOps(unpatch=unpatch))
        assert (fusedops.integrations.describe(module).num_replaced == 0) is unpatch


def test_the_report_is_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        callback = FusedOps()
        fit(Module(), tmp_path, callback)
    printed = [message for message in caplog.messages if message == str(callback.report)]
    assert len(printed) == 1 and "linear_glu" in printed[0]


def test_strict_and_level(tmp_path: Path) -> None:
    class Empty(Module):
        def _build(self, method: str) -> None:
            self.model = nn.Tanh()

    with pytest.raises(fusedops.UnsupportedError, match="strict"):
        fit(Empty(), tmp_path, FusedOps(strict=True))
    with pytest.raises(ValueError, match="level"):
        FusedOps(level="2")
