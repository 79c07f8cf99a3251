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

pytest.importorskip("transformers", reason="transformers is not installed")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

import deepspeed

from fusedops.integrations import deepspeed as socket

pytestmark = pytest.mark.usefixtures("own_products")

RANKS = 2
STEPS = 10
STAGES = (0, 1, 2, 3)
WAYS = ("stock", "initialize", "engine", "unpatched")


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def train(way: str, stage: int, rank: int) -> list[float]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = {"model": model, "optimizer": optimizer, "config": settings(stage)}
    module = socket if way == "initialize" else deepspeed
    engine, *_ = module.initialize(**given)
    if way == "engine":
        socket.patch(engine)
    elif way == "unpatched":
        socket.patch(engine)
        socket.unpatch(engine)
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
    for stage in STAGES:
        for way in WAYS:
            with counted() as calls:
                losses = train(way, stage, rank)
            found[stage, way] = (losses, dict(calls))
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def runs() -> list[dict[Any, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(serve, (folder,), RANKS)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["initialize", "engine"])
def test_losses_are_those_of_the_stock_model(stage: int, way: str, runs: Any) -> None:
    for run in runs:
        losses, calls = run[stage, way]
        for op in ("attention", "linear_glu"):
            assert calls[f"{op}_backward"] == 2 * STEPS, op
        assert calls["cross_entropy_backward"] == STEPS
        assert_same_losses(losses, run[stage, "stock"][0])


@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
def test_an_unpatched_engine_is_a_stock_one(stage: int, runs: Any) -> None:
    for run in runs:
        losses, calls = run[stage, "unpatched"]
        assert losses == run[stage, "stock"][0] and not calls


def test_what_is_no_model_and_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        socket.initialize(model={}, config={})
    for function in (socket.patch, socket.unpatch):
        with pytest.raises(TypeError, match="DeepSpeedEngine"):
            function(llama())
