"""Patched models under DeepSpeed's ZeRO, on two gloo processes: the losses of the stock ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from socket_testing import assert_same_losses, counted, llama, rows
from torch import multiprocessing

import fusedops

pytest.importorskip("transformers", reason="transformers is not installed")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

import deepspeed

from fusedops.integrations import deepspeed as socket

RANKS = 2
STEPS = 10


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def train(model: Any, stage: int, rank: int, *, late: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage))
    if late:
        socket.patch(engine)
    data, losses = rows(), []
    for step in range(STEPS):
        mine = data[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
        ids = torch.stack([each["input_ids"] for each in mine])
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def serve(rank: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu"
    )
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    # Without its extension for shared memory, which it would compile: gloo alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[Any, Any] = {}
    for stage in (0, 1, 2, 3):
        found[stage, "stock"] = (train(llama(), stage, rank), {})
        for way in ("before", "late", "plain"):
            model = llama()
            if way == "before":
                socket.patch(model)
            elif way == "plain":
                fusedops.patch(model)
            with counted() as calls:
                losses = train(model, stage, rank, late=way == "late")
            found[stage, way] = (losses, dict(calls))
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def runs() -> list[dict[Any, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(serve, (folder,), RANKS)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["before", "late", "plain"])
def test_losses_are_those_of_the_stock_model(stage: int, way: str, runs: Any) -> None:
    # What reads its children's parameters needs them gathered: the marks, under stage 3.
    gathered = stage < 3 or way == "before"
    for run in runs:
        losses, calls = run[stage, way]
        assert calls["attention_backward"] == 2 * STEPS
        assert calls.get("linear_glu_backward", 0) == (2 * STEPS if gathered else 0)
        assert calls.get("add_rms_norm_backward", 0) == (2 * STEPS if gathered else 0)
        assert_same_losses(losses, run[stage, "stock"][0])


def test_blocks_are_marked_and_unmarked() -> None:
    model = llama()
    before = {name: type(module) for name, module in model.named_modules()}
    socket.patch(model)
    marked = {name for name, each in model.named_modules() if deepspeed.utils.z3_leaf_module(each)}
    parts = ("", ".mlp")
    assert marked == {f"model.layers.{layer}{part}" for layer in (0, 1) for part in parts}
    socket.unpatch(model)
    assert not any(deepspeed.utils.z3_leaf_module(each) for each in model.modules())
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        socket.patch({})
