"""What the planner says that a step sends is what the stack records, in calls and in bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops.models import ParallelConfig, Transformer, TransformerConfig, parallelize, preset
from fusedops.parallel.budgets import Budget
from fusedops.parallel.comm import collectives
from fusedops.planner import Layout, step_traffic
from fusedops.testing import threads

ROWS, TOKENS = 8, 32
GPT2, LLAMA = preset("tiny-gpt2"), preset("tiny-llama")
MIXTRAL = preset("tiny-mixtral")
DEEP, DEEP_GPT2 = replace(LLAMA, num_layers=5), replace(GPT2, num_layers=4)


def recorded(model: TransformerConfig, config: ParallelConfig) -> list[collectives.Log]:
    """Return what each rank communicates in its second step."""

    def on_rank(_: int) -> collectives.Log:
        run = parallelize(Transformer(model, device="meta"), config, seed=0)
        text = torch.arange(ROWS * (TOKENS + 1)).reshape(ROWS, -1) % model.vocab_size
        halves = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        parts = [run.rows(half).chunk(config.microbatches) for half in halves]
        shards = [run.shard_batch(*part) for part in zip(*parts, strict=True)]
        labels = [shard.labels for shard in shards if shard.labels is not None]
        count = run.count(torch.stack(labels))
        run.step(shards, count)
        with collectives.recorded() as log:
            run.step(shards, count)
        return log

    return threads.run(on_rank, config.sizes.ranks)


def planned(model: TransformerConfig, config: ParallelConfig, rank: int) -> Any:
    rows = ROWS // (config.dp * config.microbatches)
    shape = Layout.of(precision="float32", seq_len=TOKENS, micro_batch=rows).training
    stage = rank // (config.sizes.ranks // config.pp)
    return sum(step_traffic(model, Layout(config, shape), rank=stage).values(), Budget())


MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
KEPT = {"recompute": "full", "mp_comm_recompute": False}
EXACT: list[tuple[TransformerConfig, dict[str, Any]]] = [
    (GPT2, {"dp": 2}),
    (GPT2, {"dp": 4, "microbatches": 2}),
    (LLAMA, {"dp": 2, "zero": 1, "microbatches": 2}),
    (LLAMA, {"dp": 2, "zero": 2, "microbatches": 2}),
    (LLAMA, {"dp": 2, "zero": 3, "microbatches": 2}),
    (GPT2, {"tp": 2, "microbatches": 2}),
    (LLAMA, {"tp": 4}),
    (LLAMA, {"tp": 2, "overlap_microbatches": True}),
    (GPT2, {"tp": 4, "sp": True}),
    (GPT2, {"tp": 4, "sp": True, "overlap": False}),
    (GPT2, {"tp": 2, "sp": True, "overlap_microbatches": True}),
    (GPT2, {"cp": 4, "context": "all_to_all"}),
    (DEEP_GPT2, {"pp": 2, "microbatches": 4, "pipeline_schedule": "interleaved"}),
    (DEEP_GPT2, {"pp": 2, "microbatches": 4, "pipeline_schedule": "zbv"}),
    (replace(DEEP, num_layers=4), {"pp": 2, "microbatches": 4, "pipeline_schedule": "zbv"}),
    (GPT2, {"tp": 2, "sp": True, "microbatches": 2}),
    (LLAMA, {"tp": 2, "sp": True, "overlap": False}),
    (LLAMA, {"cp": 2, "context": "all_to_all", "microbatches": 2}),
    (GPT2, {"cp": 2, "tp": 2, "sp": True, "context": "all_to_all"}),
    (LLAMA, {"dp": 2, "tp": 2, "microbatches": 2}),
    (LLAMA, {"dp": 2, "tp": 2, "zero": 1}),
    (LLAMA, {"pp": 2, "microbatches": 4}),
    (GPT2, {"pp": 2, "microbatches": 4}),
    (LLAMA, {"pp": 2, "microbatches": 2, "pipeline_schedule": "zero_bubble"}),
    (LLAMA, {"pp": 2, "tp": 2, "microbatches": 2}),
    (LLAMA, {"pp": 2, "tp": 2, "sp": True, "microbatches": 2}),
    (LLAMA, {"pp": 2, "dp": 2, "microbatches": 2}),
    (DEEP, {"pp": 2, "tp": 2, "microbatches": 2, "pipeline_cuts": (3,)}),
    (DEEP, {"pp": 2, "dp": 2, "microbatches": 2, "pipeline_cuts": (1,)}),
    (LLAMA, {"tp": 2, "recompute": "full", "microbatches": 2}),
    (LLAMA, {"tp": 2} | KEPT),
    (LLAMA, {"tp": 2, "sp": True, "overlap": False} | KEPT),
    (LLAMA, {"tp": 2, "sp": True} | KEPT),
    (GPT2, {"tp": 2, "sp": True} | KEPT),
    (DEEP, {"tp": 2, "pp": 2, "microbatches": 2} | KEPT),
    (DEEP, {"tp": 2, "recompute": "full", "recompute_layers": 3}),
    (LLAMA, {"tp": 2, "sp": True, "overlap": False, "recompute": "full"}),
    (GPT2, {"tp": 2, "sp": True, "recompute": "full"}),
    (LLAMA, {"tp": 2, "sp": True, "recompute": "norm+activation"}),
    (GPT2, {"tp": 2, "sp": True, "recompute": "norm+activation"}),
    (LLAMA, {"tp": 4, "sp": True, "recompute": "full"}),
    (LLAMA, {"tp": 2, "overlap_microbatches": True, "recompute": "full"}),
    (LLAMA, {"tp": 2, "sp": True, "overlap_microbatches": True, "recompute": "full"}),
    (LLAMA, {"cp": 2, "context": "all_to_all", "recompute": "full"}),
    (DEEP, {"dp": 2, "zero": 3, "recompute": "full", "recompute_layers": 2}),
    (GPT2, {"dp": 2, "microbatches": 2} | MIXED),
    (GPT2, {"dp": 2, "param_dtype": "bfloat16"}),
    (LLAMA, {"dp": 2, "zero": 1, "microbatches": 2} | MIXED),
    (LLAMA, {"dp": 2, "zero": 2, "microbatches": 2} | MIXED),
    (LLAMA, {"dp": 2, "zero": 3, "microbatches": 2} | MIXED),
    (LLAMA, {"dp": 2, "zero": 2, "param_dtype": "bfloat16"}),
    (LLAMA, {"dp": 2, "tp": 2, "zero": 1} | MIXED),
    (GPT2, {"pp": 2, "dp": 2, "microbatches": 2} | MIXED),
    (LLAMA, {"tp": 2, "sp": True, "overlap": False} | MIXED),
]


@pytest.mark.parametrize(
    ("model", "options"), EXACT, ids=[" ".join(map(str, given.items())) for _, given in EXACT]
)
def test_calls_and_bytes_are_those_that_are_recorded(
    model: TransformerConfig, options: dict[str, Any]
) -> None:
    config = ParallelConfig(**options)
    for rank, log in enumerate(recorded(model, config)):
        budget = planned(model, config, rank)
        assert log.bytes() == budget.bytes, (rank, log.counts(), budget)
        if not config.zero:  # layers are gathered in blocks of as many as fill a bucket
            assert log.counts() == {kind: n for kind, n in budget.calls.items() if n}, rank


@pytest.mark.parametrize(("model", "recompute"), [(GPT2, "none"), (LLAMA, "full")])
def test_ring_attention_sends_no_more_than_planned(
    model: TransformerConfig, recompute: str
) -> None:
    config = ParallelConfig(cp=4, microbatches=2, recompute=recompute)
    for rank, log in enumerate(recorded(model, config)):
        budget = planned(model, config, rank)
        assert log.counts() == dict(budget.calls)
        assert 0.5 * budget.bytes < log.bytes() <= budget.bytes


NODES = {"dp": 4, "ep": 4, "ep_nodes": 2}
EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "ep": 2, "recompute": "full"},
    {"dp": 2, "ep": 2, "recompute": "full", "ep_chunks": 2},
    {"dp": 2, "ep": 2, "router_loss": "local"},
    {"dp": 2, "ep": 2, "overlap_microbatches": True},
    {"dp": 4, "ep": 4},
    NODES,
    NODES | {"ep_reduce": "node"},
    NODES | {"ep_reduce": "node", "ep_chunks": 2, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 2, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2, "overlap_microbatches": True, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2} | KEPT,
    {"dp": 2, "tp": 2, "ep": 2, "sp": True},
    {"dp": 2, "tp": 2, "ep": 2, "sp": True, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2, "sp": True, "overlap": False, "recompute": "full"},
    {"tp": 2},
    {"dp": 2},
]


@pytest.mark.parametrize("options", EXPERTS, ids=str)
def test_experts_send_about_what_even_routing_would(options: dict[str, Any]) -> None:
    """Calls of each kind are those recorded, bytes of all-to-alls close, and all others the same.

    Experts are hashed: each is chosen about as often as any other.
    """
    hashed = replace(MIXTRAL, router="hash", top_k=1, balance_loss=0.0)
    for model, exact in ((hashed, False), (replace(MIXTRAL, num_experts=4, top_k=4), True)):
        config = ParallelConfig(microbatches=2, **options)
        for rank, log in enumerate(recorded(model, config)):
            budget = planned(model, config, rank)
            assert log.counts() == {kind: n for kind, n in budget.calls.items() if n}, rank
            # With all experts chosen by every token, the rows are known.
            assert log.bytes() == pytest.approx(budget.bytes, rel=0 if exact else 0.1), rank


def test_large_gradients_take_as_many_calls_as_buckets() -> None:
    layout = Layout.of(dp=2, precision="float32", bucket_bytes=1 << 20)
    sent = step_traffic(preset("gpt2"), layout)["data"]
    size = 4 * preset("gpt2").parameters().total
    assert sent.calls["all_reduce"] == -(-size // (1 << 20))
    assert sent.bytes == pytest.approx(size, rel=1e-3)
