"""A short training, the same on ranks and on one process, and the comparison of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from one_process import SEED, full_tensor, tiny, token_batch

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
    model: Any = engine.model
    microbatches = engine.config.microbatches
    for step in steps:
        batch = [
            None if tensor is None else tensor.roll(step, 0).to(device)
            for tensor in token_batch(training.model.vocab_size, training.documents)
        ]
        shards = [
            engine.shard_batch(
                *(
                    None if tensor is None else engine.rows(tensor.chunk(microbatches)[number])
                    for tensor in batch
                )
            )
            for number in range(microbatches)
        ]
        count = engine.count(torch.stack([shard.labels for shard in shards]))
        loss = engine.mean_loss(engine.step(shards, count), count)
        values["loss", step, ""] = loss.cpu()
        for name, parameter in model.named_parameters():
            values["gradient", step, name] = full_tensor(parameter.grad).cpu()
        values["norm", step, ""] = engine.clip(0.1).cpu()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            values["weight", step, name] = full_tensor(parameter).cpu()
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
