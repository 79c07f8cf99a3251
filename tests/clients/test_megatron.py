"""A GPT of Megatron-core with the local layer spec, in one process and split over two."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BATCH, LEARNING_RATE, Trained, Trial, batches, weights
from outcomes import Table
from torch import nn

LENGTH = 16


def build(normalization: str = "RMSNorm") -> nn.Module:
    """Return a GPT with gated layers; what Megatron asks of a GPU is answered for the CPU."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if ranks == 1 else {}
        dist.init_process_group("gloo", **alone)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        normalization=normalization,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.1,
        tensor_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=normalization),
        vocab_size=98,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )


def train(model: Any) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = []
    for ids in batches():
        loss = model(ids, positions, future, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, weights(model))


# Two norms in each of two layers, and one at the end.
OPS = {"rms_norm": 5, "attention": 2, "linear_glu": 2}
TRIAL = Trial(train, family="GPT of Megatron", build=build, ops=OPS)
# The linear layers communicate and are called.
PARALLEL = replace(TRIAL, ops=OPS | {"linear_glu": 0, "swiglu": 2})


def test_one_process(table: Table) -> None:
    table.compare(TRIAL, "megatron-core", "GPTModel, local spec")


@pytest.mark.distributed
def test_tensor_parallel(table: Table) -> None:
    table.compare(PARALLEL, "megatron-core", "GPTModel, tensor parallel", processes=2)
