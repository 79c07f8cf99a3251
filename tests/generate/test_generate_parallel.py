"""A model that is spread over ranks generates what it generates on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import fusedops
from fusedops.models import TINY, ParallelConfig, TrainEngine, Transformer, initialize, parallelize
from fusedops.parallel.comm import collectives
from fusedops.testing import cluster_step, threads

PROMPTS = [[5, 17, 3], [7], [200, 1, 1, 30, 8]]
CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_k": 8, "samples": 2, "repetition_penalty": 1.1},
    {"temperature": 0.9, "top_p": 0.9},
    {"beams": 3, "stop": [5, 66, 130]},
)
# Experts that the tokens' ids choose, also on the second stage.
HASH: dict[str, Any] = {"router": "hash", "balance_loss": 0.0, "capacity_factor": None}
KINDS = {
    "hash": replace(TINY["tiny-pangu-moe"], **HASH),
    # Experts on the second of two stages alone.
    "half": replace(TINY["tiny-mixtral"], moe_layers=1),
}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tiny-pangu", {"tp": 4}),
    ("tiny-qwen3", {"dp": 2, "tp": 2, "zero": 3}),
    ("tiny-mixtral", {"dp": 2, "tp": 2, "ep": 2}),
    ("tiny-mixtral", {"dp": 2, "ep": 2, "overlap_microbatches": True}),
    ("hash", {"pp": 2}),
    ("half", {"pp": 2, "tp": 2}),
    ("tiny-llama", {"cp": 2}),
    ("tiny-deepseek", {"pp": 2, "tp": 2, "sp": True}),
    ("tiny-pangu", {"pp": 2, "tp": 2, "sp": True}),
    ("tiny-llama", {"pp": 2, "pipeline_schedule": "zbv"}),
    ("tiny-mixtral", {"pp": 2, "dp": 2, "ep": 2, "zero": 2}),
]


def _model(name: str, layout: dict[str, Any] | None = None) -> Transformer:
    # A rank has two stages of this schedule.
    layers = 4 if "pipeline_schedule" in (layout or {}) else 2
    config = KINDS[name] if name in KINDS else TINY[name]
    config = replace(config, initializer_range=0.2, num_layers=layers)
    return Transformer(config, device="meta")


def _generated(model: Transformer | TrainEngine, prompts: Any = PROMPTS) -> list[list[list[int]]]:
    return [
        [each.tokens for each in fusedops.generate(model, prompts, tokens=8, **call)]
        for call in CALLS
    ]


@pytest.mark.ci(every=4)
@pytest.mark.parametrize(
    ("name", "layout"),
    LAYOUTS,
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_ranks_generate_what_one_process_does(name: str, layout: dict[str, Any]) -> None:
    alone = _model(name, layout).to_empty(device="cpu")
    initialize(alone, 0)
    expected = _generated(alone), _generated(alone, PROMPTS[0])

    def on_rank(rank: int) -> Any:
        engine = parallelize(_model(name, layout), ParallelConfig(**layout), seed=0)
        # With one prompt a rank of dp has none.
        return _generated(engine), _generated(engine, PROMPTS[0])

    ranks = math.prod(layout.get(each, 1) for each in ("dp", "cp", "tp", "pp"))
    for found in threads.run(on_rank, ranks):
        assert found == expected


@pytest.mark.parametrize("call", CALLS, ids=",".join)
def test_no_operator_mixes_tensors_of_host_and_device(call: dict[str, Any]) -> None:
    def make() -> Callable[[], Any]:
        engine = parallelize(_model("tiny-llama"), ParallelConfig(), device="cuda", seed=0)
        return lambda: fusedops.generate(engine, PROMPTS, tokens=3, **call)

    step = cluster_step(make, 1, warm_up=0)
    assert step.misplaced == {}, str(step)


def _communicated(rank: int, layout: dict[str, Any], call: dict[str, Any]) -> list[Any]:
    """Return the log of the communications of each of four rounds."""
    engine = parallelize(_model("tiny-llama"), ParallelConfig(**layout), seed=0)
    logs = []
    tokens = fusedops.generation.stream(engine, PROMPTS, tokens=4, **call)
    for _ in range(4):
        with collectives.recorded() as log:
            for _ in PROMPTS:
                next(tokens)
        logs.append(log)
    return logs


@pytest.mark.parametrize(("top_k", "candidates"), [(0, 1), (8, 8), (32, 0)])
def test_a_token_communicates_twice_a_layer_and_at_both_ends(top_k: int, candidates: int) -> None:
    config = TINY["tiny-llama"]
    call = {"top_k": top_k, "temperature": 1.0} if top_k else {}
    # A value and a word of each candidate of the other rank, or half of the logits.
    sent = 16 * candidates if candidates else 4 * config.vocab_size // 2
    for logs in threads.run(_communicated, 2, {"tp": 2}, call):
        for log in logs:
            assert log.counts() == {"all_reduce": 2 * config.num_layers + 1, "all_gather": 1}
            assert log.bytes("all_gather") == len(PROMPTS) * sent


def test_of_a_pipeline_hidden_states_and_tokens_travel() -> None:
    hidden = TINY["tiny-llama"].hidden_size
    first, last = threads.run(_communicated, 2, {"pp": 2}, {})
    # The first rounds also tell the shapes.
    assert [log.counts() for log in first[2:]] == [{"send_receive": 1, "broadcast": 1}] * 2
    assert [log.bytes() for log in first[2:]] == [4 * hidden * len(PROMPTS)] * 2
    assert [log.bytes() for log in last[2:]] == [8 * len(PROMPTS)] * 2
