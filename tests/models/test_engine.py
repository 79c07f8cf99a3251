"""``TrainEngine``: what ``parallelize`` returns, on one process and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedops
from fusedops.models import (
    ParallelConfig,
    TrainEngine,
    Transformer,
    initialize,
    parallelize,
    preset,
    save_huggingface,
)
from fusedops.testing import threads


def _model() -> Transformer:
    return Transformer(preset("tiny-llama"), device="meta")


def _trained(engine: TrainEngine) -> list[torch.Tensor]:
    """Return the losses of three steps and the weights after them."""
    batch = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    optimizer = engine.optimizer(lr=1e-2)
    losses = []
    for _ in range(3):
        parts = batch.chunk(engine.config.microbatches)
        shards = [engine.shard_batch(part[:, :-1], part[:, 1:]) for part in parts]
        count = engine.count(batch[:, 1:])
        losses.append(engine.mean_loss(engine.step(shards, count), count))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in engine.model.parameters())]


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
    expected = _trained(TrainEngine(plain, parts))
    assert all(map(torch.equal, _trained(engine), expected))


def _refused(rank: int) -> None:
    says = "model must be the TrainEngine that parallelize returned"
    sharded = parallelize(_model(), ParallelConfig(tp=2), seed=0)
    with pytest.raises(ValueError, match=says):
        fusedops.generate(sharded.model, [[1, 2]], tokens=2)
    stage = parallelize(_model(), ParallelConfig(pp=2), seed=0)
    with pytest.raises(ValueError, match=says):
        save_huggingface(stage.model, "unused")


def test_a_sharded_model_without_its_engine_is_refused() -> None:
    threads.run(_refused, 2)


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
