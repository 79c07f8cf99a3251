"""The planner's weights, gradients and states are those of a rank that ``parallelize`` made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.parallel.data import fsdp
from fusedops.parallel.tensor.layers import local
from fusedops.planner import Layout, TrainingShape, estimate
from fusedops.testing import threads

TINY_MIXTRAL = replace(
    preset("mixtral-8x7b"),
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    vocab_size=64,
    seq_len=16,
    num_experts=4,
)


def _local_parameters(rank: int, sizes: dict[str, int]) -> int:
    model = Transformer(TINY_MIXTRAL)
    parallelize(model, ParallelConfig(**sizes))
    return sum(local(parameter).numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2},
        {"tp": 2, "zero": 3},
        {"tp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "dp": 2, "zero": 3},
        {"tp": 2, "dp": 2, "ep": 2, "zero": 3},
        {"dp": 2, "zero": 3},
    ],
    ids=str,
)
def test_estimated_weights_are_those_that_a_rank_holds(sizes: dict[str, Any]) -> None:
    ranks = sizes.get("tp", 1) * sizes.get("dp", 1)
    held = threads.run(_local_parameters, ranks, sizes)
    found = estimate(TINY_MIXTRAL, Layout.of(precision="float32", **sizes), devices=ranks)
    assert held == [found.weights // 4] * ranks


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
    engine = parallelize(Transformer(TINY_MIXTRAL), ParallelConfig(microbatches=2, **values))
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


@pytest.mark.parametrize(
    "values",
    [{}, {"dp": 2}, {"tp": 2}, *({"dp": 2, "zero": n} for n in (1, 2, 3))],
    ids=str,
)
def test_bytes_of_mixed_precision_are_those_that_a_rank_has(values: dict[str, Any]) -> None:
    values = values | {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    ranks = ParallelConfig(**values).sizes.ranks
    layout = Layout(ParallelConfig(microbatches=2, **values))
    estimated = estimate(TINY_MIXTRAL, layout, devices=ranks)
    expected = estimated.weights, estimated.gradients, estimated.states
    assert threads.run(_stored, ranks, values) == [expected] * ranks


def _accumulated(rank: int, dtype: torch.dtype, values: dict[str, Any]) -> int:
    model = Transformer(TINY_MIXTRAL).to(dtype)
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
    expected = estimate(TINY_MIXTRAL, layout, devices=2).gradients
    assert threads.run(_accumulated, 2, dtype, values) == [expected] * 2
