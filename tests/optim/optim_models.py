"""What ranks run with models that people have: patched under FSDP2, tensor-parallel modules."""

from __future__ import annotations

from typing import Any

import torch
from optim_ranks import full, make, outcome
from process_pool import World
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fusedops
from fusedops.optim import AdamW, OffloadedAdamW


def patched() -> nn.Module:
    """Return a small Llama of transformers in bfloat16, patched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    assert fusedops.patch(model).replaced
    return model


def language(world: World, kind: str, sharded: bool, options: dict[str, Any]) -> Any:
    """Train it under FSDP2 on two ranks, or alone; every rank has the same batches."""
    mesh = DeviceMesh("cpu", [0, 1])
    if world.rank >= 2:
        return None
    model = patched()
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make(kind, model.named_parameters(), **options)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, outcome(optimizer)


class Block(nn.Module):
    """A norm and two products with a residual, which tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def tensor_parallel(world: World, kind: str, options: dict[str, Any]) -> Any:
    """Train sequence- and tensor-parallel blocks, and plain parameters with the same gradients.

    Returns what the optimizer made of the DTensors, what AdamW made of plain tensors, and how many
    buckets were begun in the last backward.
    """
    mesh = DeviceMesh("cpu", [0, 1])
    if world.rank >= 2:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    whole = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    for block in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    optimizer = make(kind, model.named_parameters(), **options)
    reference = AdamW(zip(names, whole, strict=True), master_weights=True, **options)
    begun = 0
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(2, dim=1)[world.rank]
        model(mine).square().sum().backward()
        if isinstance(optimizer, OffloadedAdamW):
            begun = sum(bucket.job is not None for bucket in optimizer._buckets)
        for plain, cut_param in zip(whole, model.parameters(), strict=True):
            assert cut_param.grad is not None
            plain.grad = full(cut_param.grad)
        optimizer.step()
        reference.step()
    return outcome(optimizer), outcome(reference), begun
