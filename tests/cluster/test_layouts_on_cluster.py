"""Each axis and mode on ranks: losses, gradients and weights of two steps are one process's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from short_training import Training, assert_parity, build, model_config, reference, train

import fusedops
from fusedops.testing.case_run import Reference

pytestmark = pytest.mark.distributed
LLAMA = model_config("tiny-llama")
PIPELINE = {"pp": 2, "microbatches": 2}
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
# Which tokens exceed a capacity depends on the layout.
EXPERTS = model_config("tiny-pangu-moe", capacity_factor=None)
WINDOW = model_config("tiny-llama", sliding_window=10)
TRAININGS = {
    "pp-1f1b": Training(LLAMA, {**PIPELINE, "pipeline_schedule": "1f1b"}),
    "pp-zero-bubble": Training(LLAMA, {**PIPELINE, "pipeline_schedule": "zero_bubble"}),
    "tp-sp-overlap": Training(LLAMA, {"tp": 2, "sp": True, "overlap": True}),
    "zero3": Training(LLAMA, {"dp": 2, "zero": 3}),
    "ep": Training(EXPERTS, {"dp": 2, "ep": 2}),
    "cp-window-documents": Training(WINDOW, {"cp": 2}, documents=True),
    "mixed-precision": Training(LLAMA, {"dp": 2, "zero": 3, **MIXED}),
    "offload": Training(LLAMA, {"dp": 2, "zero": 2, "offload": ("optimizer", "activations")}),
}


@functools.cache
def _reference(device: str, name: str) -> Reference:
    return reference(device, TRAININGS[name])


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_train_as_one_process_does(cluster: Any, name: str) -> None:
    training = TRAININGS[name]
    layout = cluster.layout(training.layout)
    results = cluster.run(train, training._replace(layout=layout))
    assert_parity(results, _reference(cluster.device, name), layout)


# Wide first weights, so that rounding does not decide which token is the most probable one.
GENERATOR = model_config("tiny-llama", initializer_range=0.2)
PROMPTS = [[5, 17, 3], [7], [100, 1, 1, 30, 8]]
CALLS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 8, "samples": 2})


def _generate(device: str, layout: dict[str, Any]) -> list[list[list[int]]]:
    engine, _ = build(device, Training(GENERATOR, layout))
    return [
        [result.tokens for result in fusedops.generate(engine, PROMPTS, tokens=8, **call)]
        for call in CALLS
    ]


def test_ranks_generate_the_tokens_of_one_process(cluster: Any) -> None:
    expected = _generate(cluster.device, {})
    assert all(len(tokens) == 8 for call in expected for tokens in call)
    for tokens in cluster.run(_generate, cluster.layout({"tp": 2})):
        assert tokens == expected
