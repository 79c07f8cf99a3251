"""A training step on many ranks compared with one process, in float64.

In float64 only the order of sums differs, and an error in meaning is plain. ``fusedops.verify`` is
the same for random layouts; these are the named cases that the tests of ``parallelize`` and of
pipelines keep as tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops._core.labels import IGNORE_INDEX
from fusedops.models import ParallelConfig, Transformer, TransformerConfig, initialize, parallelize
from fusedops.models.parallelization.engine import MicroBatch, TrainEngine

SEED = 5
SEQUENCES, TOKENS = 8, 24
BIAS = "bias"  # of routers that balance without a loss


class Step(NamedTuple):
    """What a step computes: ``grads`` and ``weights`` by name, unsharded."""

    loss: torch.Tensor
    norm: torch.Tensor
    grads: dict[str, Any]
    weights: dict[str, Any]


def full_tensor(tensor: Any) -> Any:
    """Return an unsharded copy of a parameter, gradient or buffer; ``None`` of ``None``."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def token_batch(vocab_size: int, documents: bool = False, step: int = 0) -> tuple[Any, ...]:
    """Return tokens, labels, and documents of uneven lengths or ``None``.

    A tenth of the positions have no label, and one sequence has none at all.
    """
    generator = torch.Generator().manual_seed(3 + step)
    shape = SEQUENCES, TOKENS
    tokens, labels = torch.randint(vocab_size, (2, *shape), generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.1] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    begins = torch.rand(shape, generator=generator) < 0.15
    return tokens, labels, begins.cumsum(1) if documents else None


def shards_of(
    engine: TrainEngine, documents: bool = False, step: int = 0, device: str = "cpu"
) -> tuple[list[MicroBatch], torch.Tensor]:
    """Return what this rank has of the micro-batches of a step, and how many targets all have.

    The content of a micro-batch does not depend on the layout; each rank takes its rows of it.
    """
    config: Any = engine.model.config
    shards = []
    batch = [
        each if each is None else each.to(device)
        for each in token_batch(config.vocab_size, documents, step)
    ]
    for i in range(engine.config.microbatches):
        tokens, labels, ids = (
            each if each is None else engine.rows(each.chunk(engine.config.microbatches)[i])
            for each in batch
        )
        domains = tokens % 2 if config.domain_experts else None
        shards.append(engine.shard_batch(tokens, labels, document_ids=ids, domains=domains))
    return shards, engine.count(torch.stack([shard.labels for shard in shards]))


def update(engine: TrainEngine, optimizer: Any, loss: torch.Tensor) -> Step:
    """Clip, and step with the gradients of a loss."""
    model = engine.model
    grads = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    norm = engine.clip(0.1)
    optimizer.step()
    engine.balance()
    optimizer.zero_grad()
    weights = {name: full_tensor(parameter) for name, parameter in model.named_parameters()}
    biases = {name: full_tensor(buffer) for name, buffer in model.named_buffers() if BIAS in name}
    return Step(loss, norm, grads, weights | biases)


def train(
    engine: TrainEngine,
    steps: int,
    *,
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: float,
) -> list[Step]:
    """Make steps; ``options`` are the optimizer's."""
    optimizer, made = engine.optimizer(lr=0.01, **options), []
    for step in range(steps):
        shards, count = shards_of(engine, step=step)
        losses = engine.step(shards, count, computing=computing)
        made.append(update(engine, optimizer, engine.mean_loss(losses, count)))
    return made


def run_step(engine: TrainEngine, *, documents: bool = False, own_loop: bool = False) -> Step:
    """Make one step; in an ``own_loop`` the caller runs forward and backward itself.

    Without it, the loss is also compared with that of ``engine.forward``.
    """
    model: Any = engine.model
    optimizer = engine.optimizer(lr=0.01, eps=1e-3)
    shards, count = shards_of(engine, documents)
    if own_loop:
        outputs = []
        for shard in shards:
            engine.begin(last=shard is shards[-1])
            inputs = {"positions": shard.positions, "document_ids": shard.document_ids}
            outputs.append(model(*shard[:2], **inputs))
            engine.loss(outputs[-1], count).backward()
        return update(engine, optimizer, engine.mean_loss(outputs, count))
    with torch.no_grad():
        before = engine.mean_loss(engine.forward(shards), count)
    loss = engine.mean_loss(engine.step(shards, count), count)
    if not model.config.dropout:
        torch.testing.assert_close(before, loss)
    return update(engine, optimizer, loss)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in patterns))


def one_process_engine(config: TransformerConfig, microbatches: int = 1) -> TrainEngine:
    """Return a model in float64 with the first weights of all layouts."""
    model = Transformer(config, dtype=torch.float64, device="meta").to_empty(device="cpu")
    initialize(model, SEED)
    return TrainEngine(model, ParallelConfig(microbatches=microbatches))


@functools.cache
def one_process_step(
    config: TransformerConfig, microbatches: int, frozen: tuple[str, ...], **options: bool
) -> Step:
    """Return the step of one process; ``options`` are those of ``run_step``."""
    engine = one_process_engine(config, microbatches)
    freeze(engine.model, frozen)
    return run_step(engine, **options)


def assert_one_process(
    rank: int,
    config: TransformerConfig,
    values: dict[str, Any],
    *,
    on_meta: bool = True,
    frozen: tuple[str, ...] = (),
    **options: bool,
) -> list[str]:
    """Compare a step of this rank with one process; return the names of its parameters.

    A stage of a pipeline has some of them. A model that has values before ``parallelize`` (not
    ``on_meta``) has other ones on each rank, of which those of rank 0 count. Parameters that match
    a pattern of ``frozen`` are not trained.
    """
    expected = one_process_step(config, values.get("microbatches", 1), frozen, **options)
    model = Transformer(config, dtype=torch.float64, device="meta")
    if not on_meta:
        model.to_empty(device="cpu")
        initialize(model, SEED if rank == 0 else SEED + 1)
    freeze(model, frozen)
    step = run_step(parallelize(model, ParallelConfig(**values), seed=SEED), **options)
    torch.testing.assert_close(step.loss, expected.loss, msg=lambda text: f"loss: {text}")
    torch.testing.assert_close(step.norm, expected.norm, msg=lambda text: f"norm: {text}")
    for kind in ("grads", "weights"):
        for name, value in getattr(step, kind).items():
            torch.testing.assert_close(
                value,
                getattr(expected, kind)[name],
                msg=lambda text, prefix=f"{kind} of {name}": f"{prefix}: {text}",
            )
    return list(step.grads)


def tiny(preset: TransformerConfig, **changes: Any) -> TransformerConfig:
    """Return a preset in a size for tests; with losses of the router if it has experts."""
    losses = {"balance_loss": 0.01, "z_loss": 0.001} if preset.num_experts else {}
    return replace(preset, **({"vocab_size": 131, "seq_len": 32} | losses | changes))
