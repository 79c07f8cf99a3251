"""Experts in host memory: the bits of a run that keeps them, and only those that are used move."""

from __future__ import annotations

import copy
import functools
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedops
from fusedops import memory
from fusedops.memory.engine import HostEngine
from fusedops.models import ParallelConfig, Transformer, parallelize, parallelized, preset
from fusedops.parity import threads

STEPS = 4
# One expert a token, by its id: with few words some experts rest, others in each step.
CONFIG = replace(preset("tiny-mixtral"), num_experts=8, top_k=1, router="hash", balance_loss=0.0)


def _train(rank: int, values: dict[str, Any]) -> Any:
    """Return losses, weights and what layers moved, of a few steps on other words each."""
    model = Transformer(CONFIG, device="meta")
    model = parallelize(model, ParallelConfig(**values), seed=3)
    run = parallelized(model)
    optimizer = run.optimizer(lr=0.05, weight_decay=0.1)
    losses, chosen = [], []
    stores = [layer.feed_forward.experts.stored for layer in model.layers.values()]
    for step in range(STEPS):
        words = 5 * step + torch.arange(4) % 3
        tokens = run.rows(words[:, None] + torch.arange(9) % 2)
        shard = run.shard_batch(tokens[:, :-1], tokens[:, 1:])
        count = run.count(shard.labels)
        losses.append(float(run.mean_loss(run.step([shard], count), count)))
        chosen.append([each.traffic.chosen for each in stores if each is not None])
        run.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: _whole(each.detach()) for name, each in model.named_parameters()}
    return losses, weights, chosen, [each and copy.copy(each.traffic) for each in stores]


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@functools.cache
def _kept(ranks: int, ep: int) -> Any:
    return threads.run(_train, ranks, {"dp": ranks, "ep": ep})[0]


CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "recomputed": {"recompute": "full"},
    "beside all that can be offloaded": {"offload": ("experts", "activations", "optimizer")},
    "shared by two": {"dp": 2, "ep": 2},
    "copies on two": {"dp": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_experts_that_stay(case: str) -> None:
    values = {"offload": ("experts",), **CASES[case]}
    config = ParallelConfig(**values)
    ranks = config.dp
    wanted, weights, *_ = _kept(ranks, config.ep)
    for losses, found, chosen, traffic in threads.run(_train, ranks, values):
        assert losses == wanted
        assert all(torch.equal(found[name], each) for name, each in weights.items())
        here = 8 // config.ep
        one = sum(
            each[0].nbytes for name, each in weights.items() if ".0.feed" in name and "exp" in name
        )
        for layer, each in enumerate(traffic):
            used = [step[layer] for step in chosen]
            assert all(0 < len(some) < here for some in used) and len(set(used)) > 1
            times = 3 if config.recompute == "full" else 2
            assert each.fetched_bytes == times * one * sum(map(len, used))
            assert each.returned_bytes == one * sum(map(len, used))


def test_copies_that_come_late_are_waited_for() -> None:
    torch.manual_seed(0)
    kept = fusedops.nn.MoE(16, 32, num_experts=6, top_k=2, bias=True)
    stored = copy.deepcopy(kept)
    engine = HostEngine(workers=3, delay=lambda number: 0.02 * (number % 2))
    settings = memory.OffloadSettings(engine=lambda device: engine, check=True)
    memory.store_experts(stored, "cpu", settings=settings)
    again = copy.deepcopy(stored)
    x = torch.randn(2, 16)
    outputs = [layer(x) for layer in (kept, stored, again)]
    for output in outputs:
        output.square().sum().backward()
    for layer, output in zip((stored, again), outputs[1:], strict=True):
        assert torch.equal(output, outputs[0])
        for mine, theirs in zip(layer.parameters(), kept.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_resting_experts_have_no_gradient_in_memory() -> None:
    layer = fusedops.nn.MoE(256, 1024, num_experts=32, top_k=1, router=False)
    memory.store_experts(layer, "cpu")
    plan = fusedops.hash_route(torch.zeros(3, dtype=torch.int64), 32)
    whole = sum(each.nbytes for each in layer.parameters())
    before = _resident()
    layer(torch.ones(3, 256), plan=plan).sum().backward()
    assert _resident() - before < whole / 2
    for each in layer.parameters():
        assert each.grad is not None and each.grad.shape == each.shape


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_no_token_and_no_gradient() -> None:
    layer = fusedops.nn.MoE(16, 32, num_experts=6, top_k=2)
    (traffic,) = memory.store_experts(layer, "cpu").values()
    assert layer(torch.ones(0, 16)).shape == (0, 16)
    with torch.no_grad():
        layer(torch.ones(1, 16))
    assert len(traffic.chosen) == 2 and traffic.returned_bytes == 0


def test_what_cannot_be_stored_is_told() -> None:
    layer = fusedops.nn.MoE(16, 32, num_experts=6, top_k=2)
    with pytest.raises(
        ValueError, match=r"model must be one with fusedops.nn.MoE layers, got none"
    ):
        memory.store_experts(torch.nn.Linear(2, 2), "cpu")
    memory.store_experts(layer, "cpu")
    with pytest.raises(ValueError, match="whose experts are not stored already"):
        memory.store_experts(layer, "cpu")


def _refused(rank: int) -> None:
    dense = Transformer(preset("tiny-llama"), device="meta")
    with pytest.raises(ValueError, match="offload must be without 'experts' for a model that has"):
        parallelize(dense, ParallelConfig(dp=2, offload="experts"))
    model = Transformer(CONFIG, device="meta")
    with pytest.raises(fusedops.UnsupportedError, match="where 2 processes have the same experts"):
        parallelize(model, ParallelConfig(dp=2, zero=1, offload="experts"))


def test_experts_that_zero_divides_are_refused() -> None:
    threads.run(_refused, 2)
