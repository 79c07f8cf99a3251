"""Hugging Face's Trainer with a policy for activations and an offloaded optimizer: the plain bits.

The example of ``docs/memory.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import DENSE
from patch_testing import losses_of, make_trainer

import fusedops
from fusedops import memory
from fusedops.memory.apply import policy_state_of
from fusedops.optim import AdamW, OffloadedAdamW

pytest.importorskip("accelerate")

STEPS = 6


def _train(folder: Path, with_policy: bool, optimizer_class: Any) -> tuple[Any, list[float]]:
    model = DENSE["Llama"].model()
    fusedops.patch(model)
    if with_policy:
        memory.apply(
            model,
            memory.Policy(memory.recompute("model.layers.0"), memory.offload("model.layers.*")),
            offload_settings=memory.OffloadSettings(least_bytes=1, check=True),
        )
    optimizer = optimizer_class(model.named_parameters(), lr=3e-3, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = [(torch.arange(16) * 3 + start) % 97 for start in range(0, 704, 11)]
    trainer = make_trainer(
        model,
        folder,
        [{"input_ids": row, "labels": row} for row in rows],
        optimizers=(optimizer, schedule),
        bf16=True,
        max_grad_norm=0.0,  # the optimizer clips
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=STEPS // 2,
    )
    losses = losses_of(trainer)
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.close()
    return model, losses


def test_the_trainer_with_a_policy_and_an_offloaded_optimizer_keeps_every_bit(
    tmp_path: Path,
) -> None:
    plain, expected = _train(tmp_path / "plain", False, AdamW)
    model, losses = _train(tmp_path / "memory", True, OffloadedAdamW)
    assert losses == expected and len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert all(
        torch.equal(mine, parameter)
        for mine, parameter in zip(model.parameters(), plain.parameters(), strict=True)
    )
    (offloader,) = policy_state_of(model).offloaders.values()
    assert offloader.moved_bytes > 0
    # What the Trainer saved on its way, torch's own optimizer goes on with.
    saved = torch.load(tmp_path / "memory" / f"checkpoint-{STEPS // 2}" / "optimizer.pt")
    stock = torch.optim.AdamW(model.parameters())
    stock.load_state_dict(saved)
    assert {float(state["step"]) for state in stock.state.values()} == {STEPS / 2}
