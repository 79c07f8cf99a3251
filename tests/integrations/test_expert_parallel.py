"""transformers' own expert parallelism runs on the fused experts, through the registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from patch_testing import assert_close, counted
from torch import nn

import fusedops

pytest.importorskip("transformers")

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

PROCESSES = 2
IDS = torch.arange(2 * 12).mul(7).remainder(97).view(2, 12)


def _save(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        head_dim=8,
        initializer_range=0.1,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(IDS, labels=IDS).loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in grads.items()
    }


def _run(rank: int, folder: str) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES}
    os.environ |= {name: str(value) for name, value in place.items()}
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    try:
        fusedops.register_experts()
        shards = DistributedConfig(tp_size=PROCESSES, enable_expert_parallel=True)
        load = Qwen3MoeForCausalLM.from_pretrained
        options = {"dtype": torch.float32}
        model = load(
            folder, distributed_config=shards, experts_implementation="fusedops", **options
        )
        assert model.model.layers[0].mlp.experts.num_experts == 6 // PROCESSES
        whole = load(folder, experts_implementation="eager", **options)
        with counted() as calls:
            found = _gradients(model)
        assert calls["moe_mlp"] == calls["moe_mlp_backward"] == 2
        for name, expected in _gradients(whole).items():
            assert_close(found[name], expected)
    finally:
        dist.destroy_process_group()


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    _save(tmp_path)
    mp.spawn(_run, args=(str(tmp_path),), nprocs=PROCESSES)
