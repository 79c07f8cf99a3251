"""A model in tensor parallel parts generates the tokens of one process."""

from __future__ import annotations

from typing import Any

import pytest
from one_process import SEED
from short_training import model_config

import fusedops
from fusedops.models import ParallelConfig, Transformer, parallelize

pytestmark = pytest.mark.distributed
# Wide first weights, so that rounding does not decide which token is the most probable one.
MODEL = model_config("tiny-llama", initializer_range=0.2)
PROMPTS = [[5, 17, 3], [7], [100, 1, 1, 30, 8]]
CALLS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 8, "samples": 2})


def _generate(device: str, layout: dict[str, Any]) -> list[list[list[int]]]:
    model = Transformer(MODEL, device="meta")
    engine = parallelize(model, ParallelConfig(**layout), device=device, seed=SEED)
    return [
        [result.tokens for result in fusedops.generate(engine, PROMPTS, tokens=8, **call)]
        for call in CALLS
    ]


def test_ranks_generate_the_tokens_of_one_process(cluster: Any) -> None:
    expected = _generate(cluster.device, {})
    assert all(len(tokens) == 8 for call in expected for tokens in call)
    for tokens in cluster.run(_generate, cluster.layout({"tp": 2})):
        assert tokens == expected
