"""Configurations that cannot be, what one means, and ``TrainEngine``, which is made from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import train
from run_ranks import on_threads

import fusedops
from fusedops import UnsupportedError
from fusedops.models import (
    ParallelConfig,
    TrainEngine,
    Transformer,
    initialize,
    parallelize,
    preset,
    save_huggingface,
)
from fusedops.models.parallelization.config import check_stages
from fusedops.testing import threads

PP2 = {"pp": 2}
REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"dp": 0}, "ParallelConfig: dp must be at least 1, got 0"),
    (ValueError, {"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
    (ValueError, {"dp": 2, "ep": 4}, "ep must be a divisor of dp x cp = 2"),
    (ValueError, {"context": "rings"}, "did you mean 'ring'"),
    (ValueError, {"mode": "dat"}, "did you mean 'data'"),
    (ValueError, {"mode": "data", "tp": 2}, "tp must be 1 with mode 'data'"),
    (ValueError, {"recompute": "ful"}, "did you mean 'full'"),
    (ValueError, {"recompute": "full+norm"}, "none or full alone"),
    (ValueError, {"recompute_layers": 2}, "None with recompute 'none'"),
    (ValueError, {"recompute": "full", "recompute_layers": 0}, "recompute_layers must be at least"),
    (ValueError, {"recompute_slice_activation": True}, "False unless recompute is 'full'"),
    (ValueError, {"recompute_slice_activation": True, "recompute": "full", "sp": True}, "with sp"),
    (ValueError, {"offload": "optimiser"}, "did you mean 'optimizer'"),
    (ValueError, {"bucket_layers": (4, 2)}, "layers in ascending order"),
    (ValueError, {"bucket_layers": ()}, "layers in ascending order"),
    (ValueError, {"shard_ranks": 2}, "None with zero 0"),
    (ValueError, {"ep_chunks": 2}, "ep_chunks must be 1 with ep 1"),
    (ValueError, {"dp": 2, "ep": 2, "ep_chunks": 9}, "ep_chunks must be from 1 to 8, got 9"),
    (ValueError, {"dp": 4, "ep": 4, "ep_nodes": 3}, "ep_nodes must be a divisor of ep, 4, got 3"),
    (ValueError, {"dp": 3, "ep": 3, "ep_deterministic": True}, "ep must be a power of two with"),
    (ValueError, {"pipeline_virtual": 2}, "pipeline_virtual must be None or 1 with pp 1, got 2"),
    (TypeError, {"tp": 2.0}, "tp must be an int, got float"),
    (TypeError, {"bucket_bytes": None}, "bucket_bytes must be an int, got NoneType"),
    (TypeError, {"sp": 1}, "sp must be a bool, got int"),
    (TypeError, {"offload": 3}, "offload must be a word or several, got 3"),
    (TypeError, {"recompute": None}, "recompute must be a str, got NoneType"),
    (ValueError, PP2 | {"pipeline_schedule": "zb"}, "must be one of 'gpipe'.*did you mean 'zbv'"),
    (
        ValueError,
        PP2 | {"pipeline_schedule": "interleaved", "microbatches": 5},
        r"microbatches must be a multiple of pp = 2, .* got 5 \(3, 4, 6, 8 would fit",
    ),
    (
        ValueError,
        PP2 | {"pipeline_schedule": "dualpipev", "microbatches": 3},
        "microbatches must be at least 4, the stages of 'dualpipev' on pp = 2 ranks, got 3",
    ),
    (
        ValueError,
        PP2 | {"pipeline_schedule": "zbv", "pipeline_virtual": 3, "microbatches": 4},
        r"pipeline_virtual must be 2 with pipeline_schedule 'zbv', got 3 \(interleaved, looped_bfs",
    ),
    (ValueError, PP2 | {"pipeline_balance": "even"}, "pipeline_balance must be"),
    (ValueError, {"dp": 2, "param_dtype": "float32"}, "param_dtype must be one of"),
    (ValueError, {"dp": 2, "zero": 1, "reduce_dtype": "float64"}, "reduce_dtype must be one of"),
    (
        UnsupportedError,
        {"dp": 2, "ep": 2, "ep_deterministic": True, "param_dtype": "bfloat16"},
        "param_dtype must be None with ep_deterministic",
    ),
    (UnsupportedError, PP2 | {"mode": "manual"}, "pp must be 1 with mode 'manual', got 2: only"),
]


@pytest.mark.parametrize(
    ("error", "values", "says"),
    REFUSED,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_without_a_meaning_are_told_with_what_would_have_one(
    error: type[Exception], values: dict[str, Any], says: str
) -> None:
    with pytest.raises(error, match=says):
        ParallelConfig(**values)


def test_in_mode_data_all_processes_are_data_parallel() -> None:
    assert ParallelConfig(mode="data", zero=2).for_ranks(6).sizes.dp == 6


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pp": 4}, r"must be at most the 3 layers, got 4 \(pp 3 would fit\)"),
        (
            {"pp": 2, "microbatches": 4, "pipeline_schedule": "zbv"},
            r"must be at most the 3 layers, got 4 \(pipeline_schedule '1f1b' would fit\)",
        ),
        (
            {"pp": 2, "pipeline_cuts": (3,)},
            r"pipeline_cuts must be 1 first layers between 1 and 2.* got \(3,\) \(\(1,\) would fit",
        ),
    ],
    ids=["layers", "virtual", "cuts"],
)
def test_layers_that_do_not_make_the_stages_are_told_with_what_would(
    values: dict[str, Any], says: str
) -> None:
    model = replace(preset("tiny-llama"), num_layers=3)
    with pytest.raises(ValueError, match=says):
        check_stages("parallelize", model, ParallelConfig(**values))


def test_selective_recomputation_is_norms_and_activations() -> None:
    meanings = {"none": set(), "norm": {"norm"}, "full": {"layer"}}
    for word, parts in (meanings | {"selective": {"norm", "activation"}}).items():
        assert ParallelConfig(recompute=word).recomputed == parts


def _model() -> Transformer:
    return Transformer(preset("tiny-llama"), device="meta")


@pytest.mark.parametrize("values", [{}, {"microbatches": 2, "recompute": "full"}])
def test_one_process_trains_without_torch_distributed(values: dict[str, Any]) -> None:
    """With the bits of a loop over the plain model: recomputation changes none."""
    model = _model()
    before = set(model.__dict__)
    engine = parallelize(model, ParallelConfig(**values), seed=0)
    assert engine.mesh is None and engine.model is model
    assert set(model.__dict__) == before, "the model does not know its engine"
    plain = _model().to_empty(device="cpu")
    initialize(plain, 0)
    parts = ParallelConfig(microbatches=values.get("microbatches", 1))
    last, expected = (train(each, 3)[-1] for each in (engine, TrainEngine(plain, parts)))
    assert torch.equal(last.loss, expected.loss)
    for name, weight in last.weights.items():
        assert torch.equal(weight, expected.weights[name]), name


@on_threads(2)
def test_a_sharded_model_without_its_engine_is_refused(rank: int) -> None:
    says = "model must be the TrainEngine that parallelize returned"
    sharded = parallelize(_model(), ParallelConfig(tp=2), seed=0)
    with pytest.raises(ValueError, match=says):
        fusedops.generate(sharded.model, [[1, 2]], tokens=2)
    stage = parallelize(_model(), ParallelConfig(pp=2), seed=0)
    with pytest.raises(ValueError, match=says):
        save_huggingface(stage.model, "unused")


def test_each_step_of_a_layout_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The plan of tensor parallelism names every kind of module that it changes."""

    def on_rank(rank: int) -> None:
        parallelize(_model(), ParallelConfig(tp=2, sp=True), seed=0)

    with caplog.at_level("DEBUG", logger="fusedops"):
        threads.run(on_rank, 2)
    text = "\n".join(caplog.messages)
    assert "parallelize: ParallelConfig(dp=1, tp=2" in text
    assert "parallelize: tp: 2 modules layers.*.attention.query: ColumnLinear.of {'seq" in text
    assert "parallelize: tp: 1 modules norm: sum_gradients" in text
