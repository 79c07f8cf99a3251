"""Experts of a model shared by ranks: the same bits for any number, and one process's training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import SEED, one_process_engine, shards_of, train
from run_ranks import on_threads
from torch import distributed as dist

from fusedops.models import ParallelConfig, Transformer, TransformerConfig, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import ordered_sum
from fusedops.testing import threads

STEPS, TOKENS = 2, 16
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
    "hash": {"balance_loss": 0.0, "router": "hash", "top_k": 1, "domain_experts": (1, 3)},
}


def _config(model: str) -> TransformerConfig:
    return replace(preset("tiny-mixtral"), **MODELS[model])


def _engine(values: dict[str, Any], dtype: torch.dtype, name: str = "losses") -> TrainEngine:
    model = Transformer(_config(name), dtype=dtype, device="meta")
    return parallelize(model, ParallelConfig(**values), seed=SEED)


def _trained(
    rank: int,
    values: dict[str, Any],
    dtype: torch.dtype,
    name: str = "losses",
    computing: Callable[[], Any] = nullcontext,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the loss of each step, and weights and biases after the last one."""
    steps = train(_engine(values, dtype, name), STEPS, computing=computing)
    return [step.loss for step in steps], steps[-1].weights


OVERLAP = {"overlap_microbatches": True}
STAGES = {"pp": 2, "dp": 2, "microbatches": 2}
LIKE_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2-ep2": ("losses", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4}),
    "ep4-nodes2-chunks2": ("losses", {"dp": 4, "ep": 4, "ep_nodes": 2, "ep_chunks": 2}),
    "ep4-nodes2-reduce": ("losses", {"dp": 4, "ep": 4, "ep_nodes": 2, "ep_reduce": "node"}),
    "bias-tp2-ep2-recompute": ("bias", {"dp": 2, "tp": 2, "ep": 2, "recompute": "full"}),
    "bias-pp2-dp2": ("bias", STAGES | {"zero": 1}),
    "hash-pp2-tp2-sp": ("hash", {"pp": 2, "tp": 2, "sp": True, "microbatches": 2}),
    "hash-cp2-tp2-ep2": ("hash", {"cp": 2, "tp": 2, "ep": 2}),
    "hash-tp2-overlap": ("hash", {"tp": 2, **OVERLAP}),
    "hash-tp2-sp-ep2-overlap": ("hash", {"dp": 2, "tp": 2, "sp": True, "ep": 2, **OVERLAP}),
    "bias-ep4-nodes2-overlap": ("bias", {"dp": 4, "ep": 4, "ep_nodes": 2, **OVERLAP}),
    "pp2-ep2-zero_bubble-overlap": (
        "losses",
        STAGES | OVERLAP | {"ep": 2, "pipeline_schedule": "zero_bubble"},
    ),
    "bias-pp2-ep2-zero2-overlap": (
        "bias",
        STAGES | OVERLAP | {"ep": 2, "zero": 2, "recompute": "full"},
    ),
    "bias-tp2-recompute-overlap": (
        "bias",
        OVERLAP | {"tp": 2, "recompute": "full", "microbatches": 2},
    ),
}


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("case", LIKE_ONE)
def test_several_steps_are_those_of_one_process(case: str) -> None:
    """Losses, weights and biases, in float64."""
    name, values = LIKE_ONE[case]
    *_, last = expected = train(
        one_process_engine(_config(name), values.get("microbatches", 1)), STEPS
    )
    ranks, seen = ParallelConfig(**values).sizes.ranks, set()
    for losses, weights in threads.run(_trained, ranks, values, torch.float64, name):
        torch.testing.assert_close(losses, [step.loss for step in expected])
        torch.testing.assert_close(weights, {name: last.weights[name] for name in weights})
        seen |= weights.keys()
    assert seen == last.weights.keys()


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


STEPS_OF: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"ep_chunks": 2},
    "overlap": {"overlap_microbatches": True},
    "recompute": {"recompute": "full"},
    "local": {"router_loss": "local"},
}


@pytest.mark.parametrize("case", STEPS_OF)
@on_threads(2)
def test_only_the_first_step_is_validated_and_a_router_loss_is_summed_once(
    rank: int, case: str
) -> None:
    layers, values = 2, STEPS_OF[case]
    run = _engine({"dp": 2, "ep": 2, "microbatches": 2, **values}, torch.float32)
    shards, count = shards_of(run)
    labels = []
    for _ in range(2):
        with collectives.recorded() as log:
            run.step(shards, count)
        labels.append(Counter(call.label for call in log.calls))
    first, second = labels
    # Of two halves the first one alone.
    assert first["error vote"] == layers * values.get("ep_chunks", 1)
    assert second["error vote"] == 0
    sums = 0 if case == "local" else 2 * layers
    assert first["router loss"] == second["router loss"] == sums
    exchanges = {"overlap": 2, "chunks": 2, "recompute": 2}.get(case, 1)
    assert second["tokens to experts"] == 2 * layers * exchanges


@pytest.mark.parametrize("router_loss", ["local", "global"])
@on_threads(2)
def test_a_local_router_loss_is_that_of_the_tokens_of_a_rank(rank: int, router_loss: str) -> None:
    values = {"dp": 2, "ep": 2, "router_loss": router_loss}
    alone, text = one_process_engine(_config("losses")), torch.arange(TOKENS)[None] * (3 * rank + 1)
    models: list[Any] = [_engine(values, torch.float64).model, alone.model]
    found, expected = (each(text, text).auxiliary.detach() for each in models)
    assert torch.allclose(found, expected) == (router_loss == "local")


@pytest.mark.parametrize(
    ("hosts", "nodes", "wrong"),
    [
        ("aabb", 2, ""),
        ("aaaa", 2, ""),
        ("abab", 1, ""),
        ("abab", 2, "ranks 0 to 1 of ep are on a, b. Start the processes of a host with"),
        ("aabc", 2, "ranks 2 to 3 of ep are on b, c"),
    ],
)
@on_threads(4)
def test_the_ranks_of_a_node_must_be_on_one_host(
    rank: int, hosts: str, nodes: int, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: hosts[dist.get_rank()])
    with pytest.raises(ValueError, match=wrong) if wrong else nullcontext():
        _engine({"dp": 4, "ep": 4, "ep_nodes": nodes}, torch.float32)


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


def _half() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_in_mixed_precision_rows_travel_in_the_dtype_of_the_products() -> None:
    """The loss before the first step is that of ranks that have all experts, to the bit."""
    exchanges = ({}, {"ep": 2}, {"ep": 2, "ep_chunks": 2}, {"ep": 2, **OVERLAP})
    same = [{"ep": ep, "ep_deterministic": True} for ep in (1, 2)]
    *found, one, other = (
        threads.run(_trained, 2, {"dp": 2, **each}, torch.float32, "losses", _half)[0]
        for each in (*exchanges, *same)
    )
    assert len({float(losses[0]) for losses, _ in found}) == 1
    _assert_same_bits([one, other])
