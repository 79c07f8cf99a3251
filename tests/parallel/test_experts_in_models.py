"""Experts of a model shared by ranks: the same bits for any number, and one process's training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops.models import (
    ParallelConfig,
    Transformer,
    initialize,
    parallelize,
    parallelized,
    preset,
)
from fusedops.models.parallelized import attach
from fusedops.parity import threads

SEED, STEPS, SEQUENCES, TOKENS = 5, 3, 8, 16
CONFIG = replace(preset("tiny-mixtral"), z_loss=0.001)


def train(model: Transformer) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the loss of each step, and the weights after the last one, whole."""
    run = parallelized(model)
    optimizer = run.optimizer(lr=0.01)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        shape = 2, SEQUENCES, TOKENS
        batch = torch.randint(model.config.vocab_size, shape, generator=generator)
        parts = [run.rows(each) for each in batch.transpose(0, 1).chunk(run.config.microbatches)]
        shards = [run.shard_batch(each[:, 0], each[:, 1]) for each in parts]
        count = run.count(torch.stack([each.labels for each in shards]))
        losses.append(run.mean_loss(run.step(shards, count), count))
        run.clip(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(each) for name, each in model.named_parameters()}


def whole(tensor: Any) -> torch.Tensor:
    """Return all of a parameter, a copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _trained(rank: int, values: dict[str, Any], dtype: torch.dtype) -> Any:
    model = Transformer(CONFIG, dtype=dtype, device="meta")
    return train(parallelize(model, ParallelConfig(**values), seed=SEED))


def _assert_one_process(values: dict[str, Any]) -> None:
    """Assert that ranks have the losses and weights of one process, in float64."""
    alone = Transformer(CONFIG, dtype=torch.float64)
    initialize(alone, SEED)
    config = ParallelConfig(microbatches=values.get("microbatches", 1))
    losses, weights = train(attach(alone, replace(parallelized(alone), config=config)))
    ranks = ParallelConfig(**values).sizes.ranks
    seen = set()
    for found, parts in threads.run(_trained, ranks, values, torch.float64):
        torch.testing.assert_close(found, losses)
        for name, each in parts.items():
            torch.testing.assert_close(each, weights[name], msg=lambda text, n=name: f"{n}: {text}")
        seen |= parts.keys()
    assert seen == weights.keys()


LIKE_ONE: dict[str, dict[str, Any]] = {
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4},
    "ep4-nodes2-chunks2": {"dp": 4, "ep": 4, "ep_nodes": 2, "ep_chunks": 2},
}


@pytest.mark.parametrize("case", LIKE_ONE)
def test_several_steps_are_those_of_one_process(case: str) -> None:
    _assert_one_process(LIKE_ONE[case])


SAME: dict[str, dict[str, Any]] = {
    "zero0-microbatches": {"microbatches": 2},
    "zero1-microbatches": {"zero": 1, "microbatches": 2},
    "zero3-recompute": {"zero": 3, "recompute": "full"},
    "cp2": {"dp": 2, "cp": 2},
}
SLOW = ("zero3-recompute", "cp2")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in SAME]
)
def test_training_gives_the_same_bits_for_any_number_of_expert_ranks(case: str) -> None:
    found = []
    for ep in (1, 2, 4):
        values = {"dp": 4, "ep": ep, "ep_same_bits": True, **SAME[case]}
        found.append(threads.run(_trained, 4, values, torch.float32)[0])
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        for name, each in weights.items():
            assert torch.equal(each, found[0][1][name]), name
