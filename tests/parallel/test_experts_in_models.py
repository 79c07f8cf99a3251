"""Experts of a model shared by ranks: the same bits for any number, and one process's training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from one_process import full_tensor
from process_pool import World
from torch import distributed as dist

from fusedops.models import ParallelConfig, Transformer, initialize, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import ordered_sum
from fusedops.testing import threads

SEED, STEPS, SEQUENCES, TOKENS = 5, 3, 8, 16
MODELS: dict[str, dict[str, Any]] = {
    "losses": {"z_loss": 0.001},
    "bias": {
        "balance_loss": 0.0,
        "balance_rate": 0.01,
        "router_score": "sigmoid",
        "num_groups": 2,
        "topk_groups": 1,
        "shared_size": 32,
        "shared_gate": True,
    },
    "eight": {"num_experts": 8},
    "hash": {"balance_loss": 0.0, "router": "hash", "top_k": 1, "domain_experts": (1, 3)},
}


def _new(model: str, dtype: torch.dtype, device: str = "cpu") -> Transformer:
    config = replace(preset("tiny-mixtral"), **MODELS[model])
    return Transformer(config, dtype=dtype, device=device)


def train(
    run: TrainEngine, computing: Callable[[], Any] = nullcontext
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the loss of each step, and weights and biases after the last one, whole."""
    model: Any = run.model
    optimizer = run.optimizer(lr=0.01)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        shape = 2, SEQUENCES, TOKENS
        batch = torch.randint(model.config.vocab_size, shape, generator=generator)
        parts = [run.rows(each) for each in batch.transpose(0, 1).chunk(run.config.microbatches)]
        shards = [run.shard_batch(*part.unbind(1), **_domains(run, part)) for part in parts]
        count = run.count(torch.stack([shard.labels for shard in shards]))
        losses.append(run.mean_loss(run.step(shards, count, computing=computing), count))
        run.clip(0.1)
        optimizer.step()
        run.balance()
        optimizer.zero_grad()
    named = (*model.named_parameters(), *model.named_buffers())
    return losses, {name: full_tensor(each) for name, each in named}


def _domains(run: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"domains": batch[:, 0] % 2} if run.model.config.domain_experts else {}


def _trained(rank: int, values: dict[str, Any], dtype: torch.dtype, name: str = "losses") -> Any:
    model = _new(name, dtype, "meta")
    return train(parallelize(model, ParallelConfig(**values), seed=SEED))


def _assert_one_process(name: str, values: dict[str, Any]) -> None:
    """Assert that ranks have the losses, weights and biases of one process, in float64."""
    alone = _new(name, torch.float64)
    initialize(alone, SEED)
    config = ParallelConfig(microbatches=values.get("microbatches", 1))
    losses, weights = train(TrainEngine(alone, config))
    ranks = ParallelConfig(**values).sizes.ranks
    seen = set()
    for found, parts in threads.run(_trained, ranks, values, torch.float64, name):
        torch.testing.assert_close(found, losses)
        for key, part in parts.items():
            torch.testing.assert_close(part, weights[key], msg=lambda text, k=key: f"{k}: {text}")
        seen |= parts.keys()
    assert seen == weights.keys()


LIKE_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2-ep2": ("losses", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4}),
    "ep4-nodes2-chunks2": ("losses", {"dp": 4, "ep": 4, "ep_nodes": 2, "ep_chunks": 2}),
    "ep4-nodes2-reduce": ("losses", {"dp": 4, "ep": 4, "ep_nodes": 2, "ep_reduce": "node"}),
    "bias-tp2-ep2-recompute": ("bias", {"dp": 2, "tp": 2, "ep": 2, "recompute": "full"}),
    "bias-pp2-dp2": ("bias", {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2}),
    "hash-pp2-tp2-sp": ("hash", {"pp": 2, "tp": 2, "sp": True, "microbatches": 2}),
    "hash-cp2-tp2-ep2": ("hash", {"cp": 2, "tp": 2, "ep": 2}),
    "hash-tp2-overlap": ("hash", {"tp": 2, "overlap_microbatches": True}),
    "hash-tp2-sp-ep2-overlap": (
        "hash",
        {"dp": 2, "tp": 2, "sp": True, "ep": 2, "overlap_microbatches": True},
    ),
    "bias-ep4-nodes2-overlap": (
        "bias",
        {"dp": 4, "ep": 4, "ep_nodes": 2, "overlap_microbatches": True},
    ),
    "pp2-ep2-zero_bubble-overlap": (
        "losses",
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 2, "overlap_microbatches": True}
        | {"pipeline_schedule": "zero_bubble"},
    ),
    "bias-pp2-ep2-zero2-overlap": (
        "bias",
        {
            "pp": 2,
            "dp": 2,
            "ep": 2,
            "zero": 2,
            "microbatches": 2,
            "overlap_microbatches": True,
            "recompute": "full",
        },
    ),
    "bias-tp2-recompute-overlap": (
        "bias",
        {"tp": 2, "recompute": "full", "microbatches": 2, "overlap_microbatches": True},
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", LIKE_ONE)
def test_several_steps_are_those_of_one_process(case: str) -> None:
    _assert_one_process(*LIKE_ONE[case])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 6, 7, 20, 24])
def test_sums_of_neighbours_are_parts_of_the_ordered_sum(ranks: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(ranks)]
    parts = [part.to(dtype) for part in parts]
    given = [each.clone() for each in parts]
    whole = ordered_sum(parts)
    assert all(map(torch.equal, parts, given)) and whole.dtype == dtype
    exact = torch.stack(parts).double().sum(0)
    torch.testing.assert_close(whole, exact.to(dtype))
    for size in (2, 4, 8):
        if ranks % size == 0:
            wide = [each.float() for each in parts]  # a sum that was rounded is another part
            sums = [ordered_sum(wide[i : i + size]) for i in range(0, ranks, size)]
            assert torch.equal(ordered_sum(sums).to(dtype), whole)


def _exchanges(rank: int, values: dict[str, Any]) -> list[tuple[str, int]]:
    """Return label and ranks of the exchanges of a forward."""
    config = ParallelConfig(dp=4, ep=4, **values)
    model = parallelize(_new("losses", torch.float32, "meta"), config, seed=SEED).model
    with collectives.recorded() as log:
        model(torch.arange(TOKENS)[None])
    return [(call.label, call.ranks) for call in log.calls]


def test_nodes_and_chunks_are_those_of_the_exchange() -> None:
    layers, rows = 2, "tokens to experts"
    found = [
        Counter(threads.run(_exchanges, 4, values)[0])
        for values in ({}, {"ep_nodes": 2}, {"ep_chunks": 2})
    ]
    assert [each[rows, 4] for each in found] == [layers, 0, 2 * layers]
    # Between two nodes, then between two ranks of one.
    assert [each[rows, 2] for each in found] == [0, 2 * layers, 0]


def _steps(rank: int, values: dict[str, Any]) -> list[Counter[str]]:
    """Return the labels of what a rank communicates in each of two steps."""
    config = ParallelConfig(dp=2, ep=2, **values)
    run = parallelize(_new("losses", torch.float32, "meta"), config, seed=SEED)
    rows = run.rows(torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % 64)
    shards = [run.shard_batch(part, part) for part in rows.chunk(config.microbatches)]
    count = run.count(torch.stack([shard.labels for shard in shards if shard.labels is not None]))
    labels = []
    for _ in range(2):
        with collectives.recorded() as log:
            run.step(shards, count)
        labels.append(Counter(call.label for call in log.calls))
    return labels


STEPS_OF: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"ep_chunks": 2},
    "overlap": {"overlap_microbatches": True},
    "recompute": {"recompute": "full"},
    "local": {"router_loss": "local"},
}


@pytest.mark.parametrize("case", STEPS_OF)
def test_only_the_first_step_is_validated_and_a_router_loss_is_summed_once(case: str) -> None:
    layers, values = 2, STEPS_OF[case]
    parts = 2 if case == "overlap" else values.get("ep_chunks", 1)
    sums = 0 if case == "local" else 2 * layers
    for first, second in threads.run(_steps, 2, values | {"microbatches": 2}):
        # Of two halves the first one alone.
        votes = layers * values.get("ep_chunks", 1)
        assert first["error vote"] == votes and second["error vote"] == 0
        assert first["router loss"] == second["router loss"] == sums
        assert second["tokens to experts"] == 2 * layers * parts * (2 if case == "recompute" else 1)


def _router_loss(rank: int, router_loss: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the auxiliary loss of a rank, and that of one process with the tokens of the rank."""
    config = ParallelConfig(dp=2, ep=2, router_loss=router_loss)
    model: Any = parallelize(_new("losses", torch.float64, "meta"), config, seed=SEED).model
    alone = _new("losses", torch.float64)
    initialize(alone, SEED)
    text = torch.arange(TOKENS)[None] * (3 * rank + 1)
    losses = [each(text, text).auxiliary.detach() for each in (model, alone)]
    return losses[0], losses[1]


def test_a_local_router_loss_is_that_of_the_tokens_of_a_rank() -> None:
    for found, alone in threads.run(_router_loss, 2, "local"):
        torch.testing.assert_close(found, alone)
    assert any(
        not torch.allclose(found, alone) for found, alone in threads.run(_router_loss, 2, "global")
    )


def _on_hosts(rank: int, nodes: int) -> str:
    config = ParallelConfig(dp=4, ep=4, ep_nodes=nodes)
    try:
        parallelize(_new("losses", torch.float32, "meta"), config, seed=SEED)
    except ValueError as error:
        return str(error)
    return ""


def test_the_ranks_of_a_node_must_be_on_one_host() -> None:
    for hosts, nodes, wrong in (
        ("aabb", 2, ""),
        ("aaaa", 2, ""),
        ("abab", 1, ""),
        ("abab", 2, "ranks 0 to 1 of ep are on a, b. Start the processes of a host with"),
        ("aabc", 2, "ranks 2 to 3 of ep are on b, c"),
    ):
        with mock.patch("socket.gethostname", lambda hosts=hosts: hosts[dist.get_rank()]):
            errors = threads.run(_on_hosts, 4, nodes)
        assert all(wrong in error and bool(wrong) == bool(error) for error in errors), errors


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
        values = {"dp": 4, "ep": ep, "ep_deterministic": True, **SAME[case]}
        found.append(threads.run(_trained, 4, values, torch.float32)[0])
    _assert_same_bits(found)


def _assert_same_bits(found: list[Any]) -> None:
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        for name, weight in weights.items():
            assert torch.equal(weight, found[0][1][name]), name


def _mixed(rank: int, values: dict[str, Any]) -> Any:
    run = parallelize(_new("losses", torch.float32, "meta"), ParallelConfig(**values), seed=SEED)
    return train(run, lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_in_mixed_precision_rows_travel_in_the_dtype_of_the_products() -> None:
    """The loss before the first step is that of ranks that have all experts, to the bit."""
    exchanges = ({}, {"ep": 2}, {"ep": 2, "ep_chunks": 2})
    found = [threads.run(_mixed, 2, {"dp": 2, **exchange})[0] for exchange in exchanges]
    assert found[0][0][0] == found[1][0][0] == found[2][0][0]
    same = [{"dp": 2, "ep": ep, "ep_deterministic": True} for ep in (1, 2)]
    _assert_same_bits([threads.run(_mixed, 2, each)[0] for each in same])


def _on_processes(world: World) -> None:
    """Train on eight ranks; gloo adds what is no expert's in an order of its own."""
    values = {"dp": 8, "microbatches": 1, "ep_deterministic": True}
    _assert_same_bits(
        [_trained(world.rank, values | {"ep": ep}, torch.float32, "eight") for ep in (1, 2, 8)]
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_so_it_does_over_gloo(on_ranks: Callable[..., Any]) -> None:
    on_ranks(_on_processes)
