"""transformers' Trainer, accelerate and DeepSpeed, in one process and in two, train as stock."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import CORE
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
    rows,
    steps,
    weights,
    whole,
)
from patch_testing import ARGUMENTS, losses_of
from torch import nn

from fusedops.integrations import deepspeed as deepspeed_socket


def train(model: nn.Module, split: str = "", batch: int = BATCH, **options: Any) -> Trained:
    """Train with the Trainer; ``split`` names the size of accelerate's that is two."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import Trainer, TrainingArguments

    if "deepspeed" in options:
        compile_nothing()
    parallel, data = None, rows()
    if split:
        data = [{**row, "position_ids": torch.arange(len(row["labels"]))} for row in data]
        heads = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        handler = {"sp_handler": heads} if split == "sp_size" else {}
        parallel = ParallelismConfig(**{split: 2}, **handler)
    with tempfile.TemporaryDirectory() as folder:
        descent = {"optim": "sgd", "learning_rate": LEARNING_RATE, "max_steps": STEPS}
        on_cpu = {"use_cpu": "deepspeed" not in options}  # with it DeepSpeed would be ignored
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            parallelism_config=parallel,
            **(ARGUMENTS | descent | on_cpu | options),
        )
        if "fsdp" in options:
            shard_on_cpu()
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        # What a CPU does not have, both turn off without a word.
        assert trainer.is_fsdp_enabled == ("fsdp" in options)
        assert trainer.is_deepspeed_enabled == ("deepspeed" in options)
        return Trained(losses_of(trainer), _weights(trainer))


def shard_on_cpu() -> None:
    """Let accelerate shard: of processes without an accelerator it would only copy the model."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    assert state.distributed_type is DistributedType.MULTI_CPU
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def compile_nothing() -> None:
    """Let DeepSpeed send by gloo alone: it would compile an extension for shared memory."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole weights, of which under ZeRO's third stage a rank has a piece of each."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return weights(model)


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights on every rank."""
    if trainer.is_deepspeed_enabled:
        return gathered(trainer.model)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: whole(each).clone() for name, each in state.items()}


def zero(stage: int, batch: int = BATCH) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,  # no weight is small enough to be kept whole
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


FSDP = {"fsdp": True}
ONE = {
    "plain": Trial(train),
    # The first norm of a layer, its attention and its gated layer run twice: nothing else shows
    # that a patched layer is still checkpointed.
    "gradient checkpointing": Trial(
        train,
        {"gradient_checkpointing": True},
        ops={"attention": 4, "linear_glu": 4, "rms_norm": 9},
        suffix="",
    ),
    "gradient accumulation": Trial(train, {"gradient_accumulation_steps": 2}, backwards=2 * STEPS),
    "bf16 autocast": Trial(train, {"bf16": True}, exactly={"bf16": False}, dtype=torch.bfloat16),
    "label smoothing": Trial(
        train, {"label_smoothing_factor": 0.1}, ops={**OPS, "cross_entropy": 0}
    ),
    "LoRA on attention": Trial(train, prepare=lora(*ATTENTION), suffix=""),
    "LoRA on attention, bf16 autocast": Trial(
        train,
        {"bf16": True},
        prepare=lora(*ATTENTION),
        suffix="",
        exactly={"bf16": False},
        dtype=torch.bfloat16,
    ),
    "torch_compile (aot_eager)": Trial(train, {"torch_compile_backend": "aot_eager"}),
}
TWO = {
    "DDP": Trial(train),
    "FSDP2": Trial(train, {**FSDP, "fsdp_config": {"version": 2}}),
    # One sequence at a time: the stock loss cannot view the labels of a piece of several.
    "sp_size=2 (Ulysses)": Trial(
        train,
        {"deepspeed": zero(1, batch=1), "batch": 1, "split": "sp_size"},
        ops={**OPS, "attention": 0},
        exactly=None,
    ),
}


@pytest.mark.parametrize("mode", ONE)
def test_one_process(mode: str, table: Table) -> None:
    table.compare(ONE[mode], "transformers", mode)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", TWO)
def test_two_processes(mode: str, table: Table) -> None:
    table.compare(TWO[mode], "transformers", mode, processes=2)


@pytest.mark.distributed
def test_context_parallel(table: Table) -> None:
    """Under it a patched attention must ask torch for its kernel, which a CPU does not have."""
    trial = Trial(train, {**FSDP, "fsdp_config": {"version": 2}, "split": "cp_size"})
    gap = "torch's context parallelism has no attention for CPUs, nor for the stock model"
    lacking = "attention_for_cpu.default does not have a sharding strategy"
    with pytest.raises(AssertionError, match=lacking):
        table.compare(trial, "transformers", "cp_size=2 (context parallel)", processes=2, gap=gap)


# A loop of one's own with accelerate.


def loop(model: nn.Module, precision: str = "no", fsdp: bool = False, every: int = 1) -> Trained:
    """Train by accelerate, which spreads the batches of all ranks; a step after ``every`` batch."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin: Any = None
    if fsdp:
        shard_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=every,
    )
    assert accelerator.is_fsdp2 == fsdp
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for ids in batches(accelerator.process_index, accelerator.num_processes):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    return Trained(losses, {name: whole(each).clone() for name, each in state.items()})


LOOPS = {
    "plain": Trial(loop),
    "gradient accumulation": Trial(loop, {"every": 2}),
    "bf16 autocast": Trial(
        loop, {"precision": "bf16"}, exactly={"precision": "no"}, dtype=torch.bfloat16
    ),
}
TWO_LOOPS = {"DDP": Trial(loop), "FSDP2": Trial(loop, {"fsdp": True})}


@pytest.mark.parametrize("mode", LOOPS)
def test_a_loop_with_accelerate(mode: str, table: Table) -> None:
    assert STEPS % 2 == 0
    table.compare(LOOPS[mode], "accelerate", mode)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", TWO_LOOPS)
def test_a_loop_with_accelerate_in_two_processes(mode: str, table: Table) -> None:
    table.compare(TWO_LOOPS[mode], "accelerate", mode, processes=2)


# DeepSpeed's ZeRO on two processes: by its engine, by our socket, by the Trainer.

# How the socket patches a model, at which stages of ZeRO.
WAYS = {"initialize": (0, 1, 2, 3), "engine": (1, 3), "unpatched": (1, 3)}


def by_engine(model: nn.Module, stage: int, way: str = "", fused: bool = False) -> Trained:
    import deepspeed

    compile_nothing()
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    module = deepspeed_socket if fused and way == "initialize" else deepspeed
    engine, *_ = module.initialize(model=model, optimizer=optimizer, config=zero(stage))
    if fused and way != "initialize":
        deepspeed_socket.patch(engine)
    if fused and way == "unpatched":
        deepspeed_socket.unpatch(engine)
    losses = steps(engine, batches(rank, processes), engine.backward, engine)
    return Trained(losses, gathered(model))


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engine(stage: int, table: Table) -> None:
    # The engine trains in float32 what is not half precision: no float64.
    trial = Trial(by_engine, {"stage": stage}, exactly=None)
    table.compare(trial, "deepspeed", f"ZeRO {stage}", processes=2)


# Linear layers of GPT-2, whose products are then torch's; layers that read the weights of their
# feed-forward layer; experts.
GATHERED: dict[str, dict[str, int]] = {
    "GPT2": {"attention": 2, "layer_norm": 5},
    "OPT": {"attention": 2, "mlp": 2, "add_layer_norm": 2},
    "Mixtral": {"attention": 2, "moe_mlp": 2},
}


def small(name: str) -> nn.Module:
    return CORE[name].model()


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["initialize", "engine"])
@pytest.mark.parametrize("name", GATHERED)
def test_weights_that_are_read_are_gathered(name: str, way: str) -> None:
    options = {"stage": 3, "way": way}
    trial = Trial(by_engine, options, build=small, config={"name": name}, by_socket=True)
    replace(trial, ops=GATHERED[name], exactly=None).compare(processes=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "stage"), [(way, stage) for way, stages in WAYS.items() for stage in stages]
)
def test_the_socket_patches_the_model_or_its_engine(way: str, stage: int) -> None:
    ops: dict[str, Any] = dict.fromkeys(OPS, 0) if way == "unpatched" else OPS
    options = {"stage": stage, "way": way}
    Trial(by_engine, options, exactly=None, ops=ops, by_socket=True).compare(processes=2)


def test_what_is_no_model_and_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        deepspeed_socket.initialize(model={}, config={})
    for function in (deepspeed_socket.patch, deepspeed_socket.unpatch):
        with pytest.raises(TypeError, match="DeepSpeedEngine"):
            function(CORE["Llama"].model())


@pytest.mark.distributed
def test_zero_by_the_trainer(table: Table) -> None:
    trial = Trial(train, {"deepspeed": zero(3)}, exactly=None)
    table.compare(trial, "deepspeed", "ZeRO 3 by transformers' Trainer", processes=2)
