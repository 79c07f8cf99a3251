"""A short training, the same on ranks and on one process, and the comparison of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from one_process import SEED, shards_of, tiny, update

from fusedops.models import ParallelConfig, Transformer, TransformerConfig, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.optim import AdamW
from fusedops.testing.case_run import Reference, Values, compare, missing

STEPS = 2
# What a layout and its reference on one process have in common.
COMMON = ("microbatches", "param_dtype", "reduce_dtype")


class Training(NamedTuple):
    """A model, and a layout of it on two ranks."""

    model: TransformerConfig
    layout: dict[str, Any]
    documents: bool = False


def model_config(name: str, **changes: Any) -> TransformerConfig:
    """Return a small preset, with an even number of words for vocabularies in parts."""
    return tiny(preset(name), vocab_size=132, **changes)


def build(
    device: str, training: Training, dtype: torch.dtype = torch.float32
) -> tuple[TrainEngine, AdamW]:
    """Return the engine of this process and its optimizer."""
    model = Transformer(training.model, dtype=dtype, device="meta")
    engine = parallelize(model, ParallelConfig(**training.layout), device=device, seed=SEED)
    return engine, engine.optimizer(lr=0.01, eps=1e-3)


def make_steps(
    device: str, engine: TrainEngine, optimizer: AdamW, training: Training, steps: Iterable[int]
) -> Values:
    """Make steps; return every loss, gradient and norm, and the last weights, unsharded."""
    values: Values = {}
    for number in steps:
        shards, count = shards_of(engine, training.documents, number, device)
        loss = engine.mean_loss(engine.step(shards, count), count)
        step = update(engine, optimizer, loss)
        values["loss", number, ""], values["norm", number, ""] = step.loss.cpu(), step.norm.cpu()
        for kind, tensors in (("gradient", step.grads), ("weight", step.weights)):
            values |= {(kind, number, name): each.cpu() for name, each in tensors.items()}
    return values


def train(
    device: str, training: Training, dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> Values:
    """Train from the first weights on."""
    return make_steps(device, *build(device, training, dtype), training, range(steps))


def reference(device: str, training: Training, steps: int = STEPS) -> Reference:
    """Train on this process, in the dtypes of the layout and in float64."""
    layout = {name: training.layout[name] for name in COMMON if name in training.layout}
    single = train(device, training._replace(layout=layout), steps=steps)
    exact = {name: layout[name] for name in ("microbatches",) if name in layout}
    truth = train(device, training._replace(layout=exact), torch.float64, steps)
    return Reference(single, truth)


def assert_parity(results: list[Values], known: Reference, layout: dict[str, Any]) -> None:
    """Assert that each rank has the values of one process, and that all ranks have all of them."""
    dtype = getattr(torch, layout.get("param_dtype", "float32"))
    comparisons = [compare(values, known, rank, dtype) for rank, values in enumerate(results)]
    differences = [
        difference for comparison in comparisons for difference in comparison.differences
    ]
    differences += missing(known, comparisons)
    assert not differences, "\n".join(map(str, differences[:5]))
