"""transformers' own expert and tensor parallelism run on the fused ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_families import DENSE, SPARSE, loss
from patch_testing import assert_close, counted
from torch import nn

import fusedops

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

PROCESSES = 2


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    loss(model).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in grads.items()
    }


def _experts(rank: int, folder: str) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    fusedops.register_experts()
    by_size = hasattr(DistributedConfig, "ep_size")  # transformers 5.23
    how = {"ep_size": PROCESSES} if by_size else {"enable_expert_parallel": True}
    shards = DistributedConfig(tp_size=PROCESSES, **how)
    load = Qwen3MoeForCausalLM.from_pretrained
    options = {"dtype": torch.float32}
    model = load(folder, distributed_config=shards, experts_implementation="fusedops", **options)
    assert model.model.layers[0].mlp.experts.num_experts == 6 // PROCESSES
    whole = load(folder, experts_implementation="eager", **options)
    with counted() as calls:
        found = _gradients(model)
    assert calls["moe_mlp"] == calls["moe_mlp_backward"] == 2
    for name, expected in _gradients(whole).items():
        assert_close(found[name], expected)


def test_gradients_of_divided_experts_are_those_of_one_process(
    tmp_path: Path, on_new_world: Callable[..., Any]
) -> None:
    SPARSE["Qwen3Moe"].model().save_pretrained(tmp_path)
    on_new_world(_experts, str(tmp_path))


def _planned(rank: int, folder: str) -> None:
    load = LlamaForCausalLM.from_pretrained
    model, whole = load(folder, tp_plan="auto"), load(folder)
    divided, weight = (each.model.layers[0].mlp.up_proj.weight for each in (model, whole))
    assert divided.to_local().numel() == weight.numel() // PROCESSES
    fusedops.patch(model)
    with counted() as calls:
        found = _gradients(model)
    assert all(calls[op] for op in ("rms_norm", "attention", "swiglu"))
    for name, expected in _gradients(whole).items():
        assert_close(found[name], expected)


def test_a_patched_model_under_transformers_plan_gives_the_gradients_of_one_process(
    tmp_path: Path, on_new_world: Callable[..., Any]
) -> None:
    DENSE["Llama"].model(vocab_size=98).save_pretrained(tmp_path)
    on_new_world(_planned, str(tmp_path))
