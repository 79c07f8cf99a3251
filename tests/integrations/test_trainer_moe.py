"""Hugging Face's Trainer trains a patched Mixtral as the stock one, and the fused ops run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causal_families import SPARSE
from patch_testing import counted, train
from torch import nn

pytest.importorskip("accelerate")

STEPS = 12


def _losses(model: nn.Module, folder: Path) -> list[float]:
    starts = torch.arange(64).mul(11)
    rows = [(torch.arange(16) * 3 + start) % 97 for start in starts]
    batches = [{"input_ids": row, "labels": row} for row in rows]
    losses, _ = train(model, folder, batches, max_steps=STEPS, per_device_train_batch_size=4)
    return losses


def test_losses_of_the_trainer_match(tmp_path: Path) -> None:
    patched, stock = SPARSE["Mixtral"].pair(output_router_logits=True)
    expected = _losses(stock, tmp_path / "stock")
    with counted() as calls:
        found = _losses(patched, tmp_path / "patched")
    assert len(found) == len(expected) == STEPS
    assert expected[-1] < 0.9 * expected[0]
    for actual, wanted in zip(found, expected, strict=True):
        assert abs(actual - wanted) <= 1e-4 * wanted
    assert calls["moe_mlp"] == calls["moe_mlp_backward"] == calls["moe_route"] == 2 * STEPS
