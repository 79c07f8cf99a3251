"""LoRA adapters by peft: what they hang on falls back, all else runs fused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from families import OPT_OPS
from harness import ATTENTION, OPS, Table, Trained, Trial, batches, lora, steps, weights
from torch import nn

import fusedops


def train(model: nn.Module) -> Trained:
    return Trained(steps(model, batches()), weights(model))


def in_half(model: nn.Module, half: bool = True) -> Trained:
    """Train with weights and adapters in bfloat16."""
    return train(model.bfloat16() if half else model)


def under_autocast(model: nn.Module, half: bool = True) -> Trained:
    """Train with weights and adapters in float32 and products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return train(model)


def checkpointed(model: nn.Module) -> Trained:
    """Train with recomputed layers, as peft's users ask for it."""
    wrapped: Any = model
    wrapped.enable_input_require_grads()
    wrapped.gradient_checkpointing_enable({"use_reentrant": False})
    return train(model)


def merged(model: nn.Module) -> Trained:
    """Train, and add the adapters to the weights."""
    losses = train(model).losses
    whole: Any = model.merge_and_unload()
    ids = batches()[0]
    with torch.no_grad():
        losses.append(whole(input_ids=ids, labels=ids).loss.item())
    return Trained(losses, weights(whole))


def quantized(model: nn.Module) -> nn.Module:
    """Add adapters to a base of 4 bits."""
    fusedops.quantize(model, "nf4", group=8)
    return lora()(model)


MLP = ("gate_proj", "up_proj", "down_proj")
# The gated layer calls the adapters, and fuses what is between the products.
CALLED = {**OPS, "linear_glu": 0, "swiglu": 2}
# The first norm is before the first adapter.
INNER = {"attention": 2, "rotary_embedding": 2, "rms_norm": 4, "cross_entropy": 1}
HALF: dict[str, Any] = {"exactly": {"half": False}, "dtype": torch.bfloat16}
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
    "all-linear, on quantised weights": trial(train, ops=CALLED, prepare=quantized),
    "all-linear, DoRA": trial(train, ops=CALLED, prepare=lora(use_dora=True)),
    "attention, bfloat16 weights": trial(in_half, prepare=lora(*ATTENTION), **HALF),
    "all-linear, bfloat16 weights": trial(in_half, ops=CALLED, prepare=lora(), **HALF),
    "attention, bf16 autocast": trial(under_autocast, prepare=lora(*ATTENTION), **HALF),
    # The first norm of a layer, its attention and its gated layer run twice.
    "attention, gradient checkpointing": trial(
        checkpointed,
        ops={"attention": 4, "linear_glu": 4, "rms_norm": 9},
        prepare=lora(*ATTENTION),
    ),
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
