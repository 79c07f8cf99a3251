"""A transformer in stages: the loss, the norm, the gradients and the weights of one process.

In float64, so that what is left are differences of order. Ranks are threads but where gloo itself
is the point.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops.models import ParallelConfig, Transformer, initialize, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.testing import threads

SEED = 5
SEQUENCES, TOKENS = 8, 12
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev")


def _config(name: str, **others: Any) -> Any:
    balanced = {"balance_loss": 0.5, "z_loss": 0.1} if preset(name).num_experts else {}
    sizes = {"num_layers": 4, "vocab_size": 131, "seq_len": 32, "moe_layers": None}
    if not preset(name).num_experts:
        del sizes["moe_layers"]
    return replace(preset(name), **(sizes | balanced | others))


def _batch(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(words, (2, SEQUENCES, TOKENS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
    labels[2] = -100
    return tokens, labels


def step(run: TrainEngine) -> tuple[Any, ...]:
    """Return the mean loss, the gradients' norm, the gradients and the weights of a step."""
    model: Any = run.model
    parts = run.config.microbatches
    batch = [each.chunk(parts) for each in _batch(model.config.vocab_size)]
    optimizer = run.optimizer(lr=0.01, eps=1e-3)
    shards = [run.shard_batch(*map(run.rows, each)) for each in zip(*batch, strict=True)]
    count = run.count(torch.stack([shard.labels for shard in shards]))
    with torch.no_grad():
        before = run.mean_loss(run.forward(shards), count)
    loss = run.mean_loss(run.step(shards, count), count)
    torch.testing.assert_close(before, loss)
    grads = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
    norm = run.clip(0.1)
    optimizer.step()
    weights = {name: _whole(each.detach()) for name, each in model.named_parameters()}
    return loss, norm, grads, weights


def _whole(tensor: Any) -> Any:
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@functools.cache
def _expected(name: str, microbatches: int, others: tuple[tuple[str, Any], ...]) -> Any:
    model = Transformer(_config(name, **dict(others)), dtype=torch.float64)
    initialize(model, SEED)
    config = ParallelConfig(microbatches=microbatches)
    return step(TrainEngine(model, config))


def check(rank: int, name: str, values: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Compare a step of this rank's part with one process; return the names of its parameters."""
    expected = _expected(name, values.get("microbatches", 1), tuple(others.items()))
    model = Transformer(_config(name, **others), dtype=torch.float64, device="meta")
    found = step(parallelize(model, ParallelConfig(**values), seed=SEED))
    torch.testing.assert_close(found[0], expected[0], msg=lambda text: f"loss: {text}")
    torch.testing.assert_close(found[1], expected[1], msg=lambda text: f"norm: {text}")
    for kind, mine, theirs in zip(("gradient", "weight"), found[2:], expected[2:], strict=True):
        for each, value in mine.items():
            said = f"{kind} of {each}"
            torch.testing.assert_close(value, theirs[each], msg=lambda text, s=said: f"{s}: {text}")
    return list(found[2])


def _checked(name: str, values: dict[str, Any], **others: Any) -> None:
    """Compare all ranks; their parts make the whole model."""
    expected = _expected(name, values.get("microbatches", 1), tuple(others.items()))
    ranks = ParallelConfig(**values).sizes.ranks
    parts = threads.run(check, ranks, name, values, others)
    assert {each for part in parts for each in part} == expected[2].keys()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_computes_what_one_process_does(schedule: str) -> None:
    values = {"pp": 2, "microbatches": 4, "pipeline_schedule": schedule}
    _checked("tiny-gpt2", values)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_losses_of_routers_count_once_on_each_stage(schedule: str) -> None:
    _checked("tiny-mixtral", {"pp": 2, "microbatches": 4, "pipeline_schedule": schedule})


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "cuts": ("tiny-llama", {"pp": 2, "microbatches": 2, "pipeline_cuts": (3,)}),
    "dp-zero1": ("tiny-llama", {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2}),
    "dp-split-backward": (
        "tiny-gpt2",
        {"pp": 2, "dp": 2, "microbatches": 2, "pipeline_schedule": "zero_bubble"},
    ),
    "tp-sp": ("tiny-gpt2", {"pp": 2, "tp": 2, "sp": True, "microbatches": 2}),
    "recompute-split-backward": (
        "tiny-llama",
        {"pp": 2, "microbatches": 4, "pipeline_schedule": "zbv", "recompute": "full"},
    ),
    "zero1-split-backward": (
        "tiny-gpt2",
        {"pp": 2, "dp": 2, "zero": 1, "microbatches": 4, "pipeline_schedule": "zbv"},
    ),
    "zero3-split-backward": (
        "tiny-mixtral",
        {"pp": 2, "dp": 2, "zero": 3, "microbatches": 4, "pipeline_schedule": "zero_bubble"},
    ),
}


@pytest.mark.parametrize("case", MORE)
def test_it_goes_with_the_other_modes(case: str) -> None:
    _checked(*MORE[case])


def _query_layer(rank: int) -> None:
    values = {"pp": 2, "microbatches": 2, "pipeline_balance": "measured"}
    check(rank, "tiny-gpt2", values, {"query_layer": True, "position_tables": 2, "tied": False})


def test_the_query_layer_stays_with_its_norm_on_the_last_stage() -> None:
    threads.run(_query_layer, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offload": {"offload": ("activations",)},
    "dp-cp": {"dp": 2, "cp": 2},
    "tp-sp": {"tp": 2, "sp": True},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "measured": {"pipeline_balance": "measured"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-mixtral"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_goes_with_every_mode(schedule: str, option: str, name: str) -> None:
    values = {"pp": 2, "microbatches": 4, "pipeline_schedule": schedule, **OPTIONS[option]}
    _checked(name, values)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_experts_are_shared_beside_stages(schedule: str) -> None:
    values = {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "pipeline_schedule": schedule}
    _checked("tiny-mixtral", values)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(schedule: str) -> None:
    values = {"pp": 4, "microbatches": 8, "pipeline_schedule": schedule}
    _checked("tiny-gpt2", values, num_layers=8)
