"""What the planner says that ranks send and hold is what the stack records, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops.models import ParallelConfig, Transformer, TransformerConfig, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.parallel.budgets import Budget
from fusedops.parallel.comm import collectives
from fusedops.parallel.data import fsdp
from fusedops.parallel.tensor.layers import local
from fusedops.planner import Layout, TrainingShape, estimate, step_traffic
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
    (GPT2, {"dp": 4, "microbatches": 2}),
    (LLAMA, {"dp": 2, "zero": 3, "microbatches": 2}),
    (GPT2, {"tp": 2, "microbatches": 2}),
    (LLAMA, {"tp": 4}),
    (LLAMA, {"tp": 2, "overlap_microbatches": True}),
    (GPT2, {"tp": 4, "sp": True}),
    (GPT2, {"tp": 2, "sp": True, "overlap_microbatches": True}),
    (DEEP_GPT2, {"pp": 2, "microbatches": 4, "pipeline_schedule": "interleaved"}),
    (DEEP_GPT2, {"pp": 2, "microbatches": 4, "pipeline_schedule": "zbv"}),
    (replace(DEEP, num_layers=4), {"pp": 2, "microbatches": 4, "pipeline_schedule": "zbv"}),
    (LLAMA, {"tp": 2, "sp": True, "overlap": False}),
    (GPT2, {"cp": 2, "tp": 2, "sp": True, "context": "all_to_all"}),
    (GPT2, {"pp": 2, "microbatches": 4}),
    (LLAMA, {"pp": 2, "microbatches": 2, "pipeline_schedule": "zero_bubble"}),
    (LLAMA, {"pp": 2, "tp": 2, "sp": True, "microbatches": 2}),
    (DEEP, {"pp": 2, "tp": 2, "microbatches": 2, "pipeline_cuts": (3,)}),
    (DEEP, {"pp": 2, "dp": 2, "microbatches": 2, "pipeline_cuts": (1,)}),
    (LLAMA, {"tp": 2, "recompute": "full", "microbatches": 2}),
    (LLAMA, {"tp": 2, "sp": True, "overlap": False} | KEPT),
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
    (LLAMA, {"dp": 2, "zero": 3, "microbatches": 2} | MIXED),
    (LLAMA, {"dp": 2, "zero": 2, "param_dtype": "bfloat16"}),
    (LLAMA, {"dp": 2, "tp": 2, "zero": 1} | MIXED),
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
    {"dp": 2, "ep": 2, "recompute": "full", "ep_chunks": 2},
    {"dp": 2, "ep": 2, "router_loss": "local"},
    {"dp": 2, "ep": 2, "overlap_microbatches": True},
    NODES,
    NODES | {"ep_reduce": "node"},
    NODES | {"ep_reduce": "node", "ep_chunks": 2, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 2, "overlap_microbatches": True, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2} | KEPT,
    {"dp": 2, "tp": 2, "ep": 2, "sp": True, "recompute": "full"},
    {"dp": 2, "tp": 2, "ep": 2, "sp": True, "overlap": False, "recompute": "full"},
    {"tp": 2},
]


@pytest.mark.ci(every=5)
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


def _bytes(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _bytes_of_step(engine: TrainEngine) -> tuple[int, int]:
    """Run a step; return the bytes of accumulated gradients, and of weights during a forward."""
    parameters = list(engine.model.parameters())
    weights = []
    engine.model.register_forward_hook(lambda model, *_: weights.append(_bytes(model.parameters())))
    tokens = engine.rows(torch.arange(64).view(4, 16)).chunk(2)
    count = torch.tensor(64)
    for i, part in enumerate(tokens):
        engine.begin(last=i == 1)
        engine.loss(engine.model(part, part), count).backward()
        if i == 0:
            gradients = [p.grad for p in parameters if p.grad is not None]
            if engine.config.zero == 1:  # before the last micro-batch they are not sharded
                groups = fsdp._parameter_groups(engine.model)
                sharded = [parameter for group in groups for parameter in group.fsdp_params]
                gradients += [parameter.unsharded_accumulated_grad for parameter in sharded]
            accumulated = _bytes(gradients)
    return accumulated, max(weights)


def _stored(rank: int, values: dict[str, Any]) -> tuple[int, int, int]:
    """Return the bytes of weights that a step keeps, of accumulated gradients, and of states.

    Stages 1 and 2 keep gathered weights until the backward, stage 3 keeps only its shards.
    """
    engine = parallelize(Transformer(MIXTRAL), ParallelConfig(microbatches=2, **values))
    optimizer = engine.optimizer()
    parameters = list(engine.model.parameters())
    masters = [p for p in parameters if p.dtype == torch.float32]  # what zero shards is one
    weights = _bytes(parameters) - _bytes(masters)
    accumulated, gathered = _bytes_of_step(engine)
    if values.get("zero") in (1, 2):
        weights = max(weights, gathered)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
    return weights, accumulated, _bytes(states) + _bytes(masters)


EP = {"tp": 2, "dp": 2, "ep": 2}
HELD: list[dict[str, Any]] = [{}, {"dp": 2}, {"tp": 2}, *({"dp": 2, "zero": n} for n in (1, 2, 3))]
HELD += [EP, EP | {"zero": 3}, {"tp": 2, "zero": 3}, {"tp": 2, "dp": 2, "zero": 3}]


@pytest.mark.parametrize("values", HELD, ids=str)
def test_bytes_of_mixed_precision_are_those_that_a_rank_has(values: dict[str, Any]) -> None:
    values = values | {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    ranks = ParallelConfig(**values).sizes.ranks
    layout = Layout(ParallelConfig(microbatches=2, **values))
    estimated = estimate(MIXTRAL, layout, devices=ranks)
    expected = estimated.weights, estimated.gradients, estimated.states
    assert threads.run(_stored, ranks, values) == [expected] * ranks


def _accumulated(rank: int, dtype: torch.dtype, values: dict[str, Any]) -> int:
    model = Transformer(MIXTRAL).to(dtype)
    return _bytes_of_step(parallelize(model, ParallelConfig(microbatches=2, **values)))[0]


@pytest.mark.parametrize(
    ("precision", "values"),
    [
        ("float32", {"reduce_dtype": "bfloat16"}),
        ("float32", {"reduce_dtype": "bfloat16", "zero": 1}),
        ("float32", {"reduce_dtype": "bfloat16", "zero": 2}),
        ("half", {"reduce_dtype": "float32"}),
        ("half", {"reduce_dtype": "float32", "zero": 1}),
    ],
    ids=str,
)
def test_gradients_have_the_dtype_in_which_they_are_accumulated(
    precision: str, values: dict[str, Any]
) -> None:
    values = values | {"dp": 2}
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    layout = Layout(ParallelConfig(microbatches=2, **values), TrainingShape(precision=precision))
    expected = estimate(MIXTRAL, layout, devices=2).gradients
    assert threads.run(_accumulated, 2, dtype, values) == [expected] * 2
