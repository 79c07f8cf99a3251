"""A model that is spread over ranks generates what it generates on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedops
from fusedops import UnsupportedError
from fusedops.generation.load import load
from fusedops.models import (
    TINY,
    ParallelConfig,
    Transformer,
    initialize,
    parallelize,
)
from fusedops.parallel import communication
from fusedops.parity import threads
from fusedops.train import train
from fusedops.train.processes import Ranks

PROMPTS = [[5, 17, 3], [7], [200, 1, 1, 30, 8]]
CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_k": 30, "samples": 2, "repetition_penalty": 1.1},
    {"beams": 3, "stop": [5, 66, 130]},
)
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tiny-llama", {"tp": 2}),
    ("tiny-gpt2", {"tp": 2, "sp": True}),
    ("tiny-pangu", {"tp": 4}),
    ("tiny-qwen3", {"dp": 2, "tp": 2, "zero": 3}),
    ("tiny-mixtral", {"tp": 2}),
    ("tiny-pangu-moe", {"dp": 2, "ep": 2}),
    ("tiny-mixtral", {"dp": 2, "tp": 2, "ep": 2}),
]


def _model(name: str) -> Transformer:
    return Transformer(replace(TINY[name], initializer_range=0.2), device="meta")


def _generated(model: Transformer, prompts: Any = PROMPTS) -> list[list[list[int]]]:
    return [
        [each.tokens for each in fusedops.generate(model, prompts, tokens=8, **call)]
        for call in CALLS
    ]


@pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=lambda each: each if isinstance(each, str) else "-".join(each)
)
def test_ranks_generate_what_one_process_does(name: str, layout: dict[str, Any]) -> None:
    alone = _model(name).to_empty(device="cpu")
    initialize(alone, 0)
    expected = _generated(alone), _generated(alone, PROMPTS[0])

    def on_rank(rank: int) -> Any:
        model = parallelize(_model(name), ParallelConfig(**layout), seed=0)
        # With one prompt a rank of dp has none.
        return _generated(model), _generated(model, PROMPTS[0])

    ranks = layout.get("dp", 1) * layout.get("tp", 1)
    for found in threads.run(on_rank, ranks):
        assert found == expected


def test_a_token_communicates_twice_a_layer_and_at_both_ends() -> None:
    def on_rank(rank: int) -> list[dict[str, int]]:
        model = parallelize(_model("tiny-llama"), ParallelConfig(tp=2), seed=0)
        counts = []
        tokens = fusedops.generation.stream(model, PROMPTS, tokens=4)
        for _ in range(4):
            with communication.recorded() as log:
                for _ in PROMPTS:
                    next(tokens)
            counts.append(log.counts())
        return counts

    layers = TINY["tiny-llama"].num_layers
    for counts in threads.run(on_rank, 2):
        assert counts == [{"all_reduce": 2 * layers + 1, "all_gather": 1}] * 4


def test_layouts_that_cannot_generate_are_refused() -> None:
    def on_rank(rank: int) -> None:
        model = parallelize(_model("tiny-llama"), ParallelConfig(cp=2), seed=0)
        with pytest.raises(UnsupportedError, match="cp must be 1, got 2"):
            fusedops.generate(model, [1])

    threads.run(on_rank, 2)


def _run(folder: Path) -> Any:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} plus {n} is {2 * n}.\n" for n in range(200)))
    return train(
        {
            "out": str(folder / "run"),
            "steps": 3,
            "batch": 4,
            "device": "cpu",
            "tune_host": False,
            "model": {"preset": "tiny-mixtral"},
            "data": {"train": [str(text)], "seq_len": 32},
            "optimizer": {"lr": 1e-2},
            "log": {"peak_tflops": 1.0},
        }
    )


def _loaded(folder: str, parallel: dict[str, Any], ranks: Ranks) -> Any:
    found = load(folder, ranks, parallel=parallel)
    prompts = [found.text.encode("1 plus 1"), found.text.encode("12")]
    return found.description, _generated(found.model, prompts)


def _on_two(world: Any, folder: str, parallel: dict[str, Any]) -> Any:
    return _loaded(folder, parallel, Ranks(torch.distributed.get_rank(), 2, torch.device("cpu")))


@pytest.mark.slow
def test_what_one_process_trained_is_loaded_by_two(tmp_path: Path, on_two_ranks: Any) -> None:
    _run(tmp_path)
    folder = str(tmp_path / "run")
    expected = _loaded(folder, {}, Ranks(0, 1, torch.device("cpu")))
    assert expected[0].endswith("run, step 3")
    for parallel in ({}, {"dp": 2, "ep": 2}):
        for found in on_two_ranks(_on_two, folder, parallel):
            assert found == expected
