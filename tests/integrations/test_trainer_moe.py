"""Hugging Face's Trainer trains a patched Mixtral as the stock one, and the fused ops run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from patch_testing import counted
from torch import nn

import fusedops

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

STEPS = 12


def _model() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        output_router_logits=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return MixtralForCausalLM(config)


def _losses(model: nn.Module, folder: Path) -> list[float]:
    starts = torch.arange(64).mul(11)
    rows = [(torch.arange(16) * 3 + start) % 61 for start in starts]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_of_the_trainer_match(tmp_path: Path) -> None:
    stock = _model()
    patched = copy.deepcopy(stock)
    fusedops.patch(patched, strict=True)
    expected = _losses(stock, tmp_path / "stock")
    with counted() as calls:
        found = _losses(patched, tmp_path / "patched")
    assert len(found) == len(expected) == STEPS
    assert expected[-1] < 0.9 * expected[0]
    for actual, wanted in zip(found, expected, strict=True):
        assert abs(actual - wanted) <= 1e-4 * wanted
    assert calls["moe_mlp"] == calls["moe_mlp_backward"] == calls["moe_route"] == 2 * STEPS
