"""Lightning's configure_optimizers returns our optimizers, on a model with a policy for memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

import torch  # noqa: E402
from causal_families import DENSE  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import fusedops  # noqa: E402
from fusedops import memory  # noqa: E402
from fusedops.optim import AdamW, OffloadedAdamW  # noqa: E402

STEPS = 8
BATCHES = [(torch.arange(16) * 3 + start).remainder(97).repeat(4, 1) for start in range(STEPS)]


class Module(lightning.LightningModule):
    """A patched language model, its optimizer and a schedule."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], with_policy: bool) -> None:
        super().__init__()
        self.model = DENSE["Llama"].model()
        fusedops.patch(self.model)
        if with_policy:
            policy = memory.Policy(memory.recompute("model.layers.*"))
            memory.apply(self.model, policy)
        self.make = make
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.model.named_parameters(), lr=3e-3, no_decay=("*norm*",))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    folder: Path,
    make: Callable[..., torch.optim.Optimizer],
    *,
    with_policy: bool = False,
    steps: int = STEPS,
    batches: list[torch.Tensor] = BATCHES,
    resume: Path | None = None,
    **options: Any,
) -> Module:
    module = Module(make, with_policy)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()
    return module


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_epochs": 2},
        {"gradient_clip_val": 0.1},
    ],
    ids=["float32", "autocast and accumulation", "clipped by the trainer"],
)
def test_an_offloaded_optimizer_and_a_policy_train_as_the_plain_ones(
    options: dict[str, Any], tmp_path: Path
) -> None:
    steps = STEPS // options.get("accumulate_grad_batches", 1)
    plain = fit(tmp_path, AdamW, steps=steps, **options)
    found = fit(tmp_path, OffloadedAdamW, with_policy=True, steps=steps, **options)
    assert found.losses == plain.losses and found.losses[-1] < found.losses[0]
    pairs = zip(found.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine, wanted) for mine, wanted in pairs)


@pytest.mark.parametrize("make", [AdamW, OffloadedAdamW])
def test_it_goes_on_from_lightnings_checkpoint(
    make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    # The same batch in each step: a plain loader does not resume where it was.
    half, same = STEPS // 2, [BATCHES[0]] * (STEPS // 2)
    whole = fit(tmp_path / "whole", make, batches=same)
    fit(tmp_path, make, steps=half, batches=same)
    rest = fit(tmp_path / "rest", make, batches=same, resume=tmp_path / f"{half}.ckpt")
    assert rest.losses == whole.losses[half:] and len(rest.losses) == half
    pairs = zip(rest.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(mine, wanted) for mine, wanted in pairs)
