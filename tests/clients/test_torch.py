"""torch's own ways to train a patched model: sharded, split, checkpointed, compiled, saved."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import OPS, STEPS, Trained, Trial, batches, steps, weights
from outcomes import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fusedops


def start() -> tuple[int, int]:
    """Join the group of all processes; return rank and size."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def train(model: nn.Module) -> Trained:
    """Train on one process, or with the same batch on all: ``model`` knows how it is split."""
    return Trained(steps(model, batches()), weights(model))


def sharded(model: nn.Module, half: bool = False) -> Trained:
    rank, processes = start()
    shard(model, half)
    return Trained(steps(model, batches(rank, processes)), weights(model))


def shard(model: nn.Module, half: bool = False) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)


def flattened(model: nn.Module) -> Trained:
    """Train under FSDP1, which keeps a layer's weights in one flat tensor."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    rank, processes = start()
    layers = ModuleWrapPolicy({type(layer) for layer in model.model.layers})
    wrapped = FSDP(
        model, auto_wrap_policy=layers, device_id=torch.device("cpu"), use_orig_params=True
    )
    losses = steps(wrapped, batches(rank, processes))
    with FSDP.summon_full_params(wrapped):
        return Trained(losses, weights(wrapped))


def split(model: nn.Module) -> nn.Module:
    """Split every layer's products over the processes."""
    _, processes = start()
    mesh = init_device_mesh("cpu", (processes,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    plan: dict[str, Any] = {
        **{name: ColwiseParallel() for name in (*columns, "mlp.gate_proj", "mlp.up_proj")},
        **{name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def planned(model: nn.Module, size: str) -> nn.Module:
    """Load the model again as transformers splits it by its own plan for that size."""
    from transformers.distributed.configuration_utils import DistributedConfig

    _, processes = start()
    folder = together(tempfile.mkdtemp())
    model.save_pretrained(folder)  # by the first process only
    dist.barrier()
    loaded = type(model).from_pretrained(
        folder,
        dtype=next(model.parameters()).dtype,
        distributed_config=DistributedConfig(**{size: processes}),
    )
    return loaded.train()


def together(folder: str) -> str:
    """Return the first process's folder."""
    named = [folder]
    dist.broadcast_object_list(named)
    return named[0]


def compiled(model: nn.Module, backend: str = "inductor") -> Trained:
    whole = torch.compile(model, backend=backend) if backend != "eager" else model
    return Trained(steps(whole, batches()), weights(model))


def selectively(model: nn.Module) -> nn.Module:
    """Keep the attention and the gated layer of a checkpointed layer, compute the rest again."""
    ops: Any = torch.ops
    kept = [ops.fusedops.attention.default, ops.fusedops.linear_glu.default, ops.aten.mm.default]
    options = {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, kept),
    }
    model.gradient_checkpointing_enable(options)
    return model


def resumed(model: nn.Module, first: str) -> Trained:
    """Train half of the steps, save by DCP, load into another model, train the other half.

    The one named ``first`` ("patched" or "stock") saves, the other loads.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    rank, processes = start()
    stock = copy.deepcopy(model)
    fusedops.unpatch(stock)
    saver, loader = (model, stock) if first == "patched" else (stock, model)
    with torch.no_grad():
        for parameter in loader.parameters():
            parameter.zero_()
    shard(saver)
    shard(loader)
    ids = batches(rank, processes)
    losses = steps(saver, ids[: STEPS // 2])
    folder = together(tempfile.mkdtemp())
    dcp.save(get_model_state_dict(saver), checkpoint_id=folder)
    state = get_model_state_dict(loader)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(loader, state)
    return Trained(losses + steps(loader, ids[STEPS // 2 :]), weights(loader))


NO_GLU = {**OPS, "linear_glu": 0}
INNER = {op: OPS[op] for op in ("attention", "rotary_embedding", "linear_glu", "cross_entropy")}
EAGER = {"backend": "eager"}
ONE = {
    "torch.compile (inductor)": Trial(compiled, config={"num_hidden_layers": 1}, exactly=EAGER),
    "torch.compile (aot_eager)": Trial(compiled, {"backend": "aot_eager"}, exactly=EAGER),
    "selective checkpoints": Trial(
        train, ops={"attention": 2, "linear_glu": 2, "rms_norm": 9}, suffix="", finish=selectively
    ),
}
ONE["torch.compile (inductor)"].ops.update(
    attention=1, rotary_embedding=1, rms_norm=3, linear_glu=1
)
HALF = Trial(sharded, {"half": True}, exactly={"half": False}, dtype=torch.bfloat16)
TWO = {
    "FSDP1": Trial(flattened),
    "FSDP2": Trial(sharded),
    "FSDP2, bf16": HALF,
    "Colwise and Rowwise": Trial(train, ops=NO_GLU, finish=split),
    "tp_size=2 of transformers": Trial(
        train, config={"vocab_size": 98}, ops=NO_GLU, prepare=partial(planned, size="tp_size")
    ),
    # Loaded and sharded at once, so patched afterwards: what has the sharding's class stays.
    "fsdp_size=2 of transformers": Trial(
        train, ops=INNER, prepare=partial(planned, size="fsdp_size")
    ),
    "DCP: patched saves, stock loads": Trial(resumed, {"first": "patched"}, backwards=STEPS // 2),
    "DCP: stock saves, patched loads": Trial(resumed, {"first": "stock"}, backwards=STEPS // 2),
}


@pytest.mark.parametrize("mode", ONE)
def test_one_process(mode: str, table: Table) -> None:
    table.compare(ONE[mode], "torch", mode)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", TWO)
def test_two_processes(mode: str, table: Table) -> None:
    table.compare(TWO[mode], "torch", mode, processes=2)
