"""torch's ways to run a patched model: sharded, split, compiled, saved, pipelined, quantised."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    ATTENTION,
    BATCH,
    LEARNING_RATE,
    OPS,
    STEPS,
    Table,
    Trained,
    Trial,
    batches,
    lora,
    steps,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
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
    inner = model.get_submodule(
        "base_model.model.model" if hasattr(model, "peft_config") else "model"
    )
    for layer in [*inner.layers, model]:
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
    "FSDP2, LoRA on attention": Trial(sharded, prepare=lora(*ATTENTION), suffix=""),
    "FSDP2, bf16, LoRA on attention": replace(HALF, prepare=lora(*ATTENTION), suffix=""),
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


# Pipeline schedules over two processes, zero-bubble ones among them.

LAYERS = 4
MICROBATCHES = 4


class Stage(nn.Module):
    """Consecutive layers of a Llama, with its embeddings if they are the first, and its head."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        inner, size = model.model, LAYERS // count
        self.embed = inner.embed_tokens if index == 0 else None
        self.layers = inner.layers[index * size : (index + 1) * size]
        self.rotary = inner.rotary_emb
        self.tail = nn.Sequential(inner.norm, model.lm_head) if index == count - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        positions = torch.arange(hidden.shape[1])[None]
        tables = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=tables)
        return hidden if self.tail is None else self.tail(hidden)


def pipelined(model: nn.Module, schedule: str) -> Trained:
    dist.init_process_group("gloo")
    try:
        return _pipelined(model, schedule, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _pipelined(model: nn.Module, schedule: str, rank: int, ranks: int) -> Trained:
    mine = _stages(schedule, rank, ranks)
    count = ranks * len(mine)
    stages = [
        PipelineStage(Stage(model, index, count), index, count, torch.device("cpu"))
        for index in mine
    ]
    make: Any = getattr(schedules, f"Schedule{schedule}")
    runs = make(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=_loss)
    held = nn.ModuleList(stage.submod for stage in stages)
    optimizer = torch.optim.SGD(held.parameters(), lr=LEARNING_RATE)
    last = count - 1 in mine
    owner = next(each for each in range(ranks) if count - 1 in _stages(schedule, each, ranks))
    losses = []
    for ids in batches():
        parts: list[torch.Tensor] = []
        wanted = {"target": ids.roll(-1, 1), "losses": parts} if last else {}
        runs.step(*([ids] if 0 in mine else []), **wanted)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(parts).mean() if last else torch.zeros((), dtype=_dtype(model))
        dist.broadcast(loss.detach(), owner)
        losses.append(loss.item())
    return Trained(losses, weights(held))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _stages(schedule: str, rank: int, ranks: int) -> tuple[int, ...]:
    if schedule == "1F1B":
        return (rank,)
    return (rank, 2 * ranks - 1 - rank if "ZBV" in schedule else rank + ranks)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_schedule(schedule: str, table: Table) -> None:
    assert BATCH == MICROBATCHES and STEPS > 1
    per_layer = ("attention", "rotary_embedding", "linear_glu")
    # Half of the layers on each rank. Forward calls: a zero-bubble schedule asks a backward twice.
    ops = dict.fromkeys(per_layer, LAYERS // 2)
    trial = Trial(
        pipelined,
        {"schedule": schedule},
        config={"num_hidden_layers": LAYERS},
        ops=ops,
        suffix="",
        backwards=STEPS * MICROBATCHES + 1,  # the first is a stage's, to learn its shapes
    )
    table.compare(trial, "torch", f"pipeline {schedule}", processes=2)


# torchao's quantised weights, before and after ``patch``, and torch.export.


def evaluate(model: nn.Module) -> Trained:
    """Return the losses of a model that is not trained, and the logits in the weights' place."""
    model.eval()
    with torch.no_grad():
        found = [model(input_ids=ids, labels=ids) for ids in batches()]
    return Trained(
        [each.loss.item() for each in found],
        {f"logits of batch {i}": each.logits for i, each in enumerate(found)},
    )


def quantized(model: nn.Module, kind: str) -> nn.Module:
    import torchao.quantization as torchao

    torchao.quantize_(model, getattr(torchao, kind)())
    return model


def exported(model: nn.Module) -> Trained:
    """As ``evaluate``, by the program that ``torch.export`` writes."""
    model.eval()
    ids = batches()[0]
    with torch.no_grad():
        program = torch.export.export(
            model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, strict=False
        )
    return evaluate(_Program(program.module()))


class _Program(nn.Module):
    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program

    def eval(self) -> nn.Module:
        return self  # an exported program is what it was when it was exported

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.program(**inputs, use_cache=False)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_quantize(kind: str, order: str, table: Table) -> None:
    """The gated layer's weights are quantised: it falls back. torchao quantises float32 only."""
    place: Any = {"before": "prepare", "after": "finish"}[order]
    trial = Trial(
        evaluate,
        ops={**OPS, "linear_glu": 0},
        suffix="",
        exactly=None,
        **{place: partial(quantized, kind=kind)},
    )
    table.compare(trial, "torchao", f"quantize_ {order} patch, {kind}")


def test_export(table: Table) -> None:
    # The fused loss leaves the fake tensors of an export to the stock one, as sharded logits.
    ops = {**OPS, "cross_entropy": 0}
    table.compare(Trial(exported, ops=ops, suffix=""), "torch", "torch.export")
