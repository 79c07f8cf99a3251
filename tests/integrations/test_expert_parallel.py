"""transformers' own expert parallelism runs on the fused experts, through the registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_families import SPARSE, loss
from patch_testing import assert_close, counted
from torch import nn

import fusedops

pytest.importorskip("transformers")

from transformers import Qwen3MoeForCausalLM

PROCESSES = 2


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    loss(model).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in grads.items()
    }


def _run(rank: int, folder: str) -> None:
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


def test_gradients_are_those_of_one_process(
    tmp_path: Path, on_new_world: Callable[..., Any]
) -> None:
    SPARSE["Qwen3Moe"].model().save_pretrained(tmp_path)
    on_new_world(_run, str(tmp_path))
