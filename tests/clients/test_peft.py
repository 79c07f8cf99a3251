"""LoRA adapters by peft: what they hang on steps aside, all else runs fused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from families import OPT_OPS
from harness import OPS, Table, Trained, Trial, batches, steps, weights
from torch import nn


def train(model: nn.Module) -> Trained:
    return Trained(steps(model, batches()), weights(model))


def merged(model: nn.Module) -> Trained:
    """Train, and add the adapters to the weights."""
    losses = train(model).losses
    whole: Any = model.merge_and_unload()
    ids = batches()[0]
    with torch.no_grad():
        losses.append(whole(input_ids=ids, labels=ids).loss.item())
    return Trained(losses, weights(whole))


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    """Return a model with adapters whose second factor is no longer zero, as after training."""
    from peft import LoraConfig, get_peft_model

    dtype = next(model.parameters()).dtype
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    # Drawn in float32 for every dtype: the numbers that torch draws depend on it.
    return get_peft_model(model.float(), config).to(dtype)


def lora(*targets: str, **options: Any) -> Any:
    return partial(adapted, target_modules=list(targets) or "all-linear", **options)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# The gated layer calls the adapters, and fuses what is between the products.
CALLED = {**OPS, "linear_glu": 0, "swiglu": 2}
# The first norm is before the first adapter.
INNER = {"attention": 2, "rotary_embedding": 2, "rms_norm": 4, "cross_entropy": 1}
# Of what lies before the first adapter no gradient is asked for: forward calls are counted.
trial = partial(Trial, suffix="")
TRIALS = {
    "q_proj, v_proj": trial(train, prepare=lora("q_proj", "v_proj")),
    "attention": trial(train, prepare=lora(*ATTENTION)),
    "down_proj": trial(train, prepare=lora("down_proj")),
    "MLP": trial(train, ops=CALLED, prepare=lora(*MLP)),
    "all-linear": trial(train, ops=CALLED, prepare=lora()),
    "all-linear, put in after patch": trial(train, ops=CALLED, finish=lora()),
    "all-linear, merged at the end": Trial(merged, ops=INNER, prepare=lora()),
    "all-linear, DoRA": trial(train, ops=CALLED, prepare=lora(use_dora=True)),
    "attention, rsLoRA": trial(train, prepare=lora(*ATTENTION, use_rslora=True)),
    "attention, a norm saved": trial(
        train, prepare=lora(*ATTENTION, modules_to_save=["input_layernorm"])
    ),
    "attention, head and embeddings": trial(
        train, prepare=lora(*ATTENTION, "lm_head", "embed_tokens")
    ),
    "fc1, fc2 of OPT": trial(
        train, family="OPT", ops={**OPT_OPS, "mlp": 0}, prepare=lora("fc1", "fc2")
    ),
}


@pytest.mark.parametrize("mode", TRIALS)
def test_lora(mode: str, table: Table) -> None:
    table.compare(TRIALS[mode], "peft", f"LoRA on {mode}")
