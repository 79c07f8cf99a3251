"""The planner's weights are held to those of a rank that ``parallelize`` made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.parallel.tensor.layers import local
from fusedops.planner import Layout, estimate
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
