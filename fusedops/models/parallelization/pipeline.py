"""A transformer split into the stages of a pipeline, and ``PipelineEngine``, which runs them.

A process keeps one ``Transformer`` without the modules of other stages, and a ``Stage`` for each
run of its layers, made of the same modules: parameters have the names of the unsplit model, so that
checkpoints do not depend on the stages. Embedding and head belong to the first and the last stage;
with a tied head the last one has the embedding of tokens as well.

Every rank of the pipeline has the complete micro-batch: hidden states are sent, tokens, labels and
positions are not. A tied embedding is replicated on the first and the last rank; its gradients are
added once, at the end of the step, the first stage's first, so that both copies keep equal bits.

Letters of shapes as in ``transformer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fusedops._core import dtypes
from fusedops._core.device_tensors import to_device
from fusedops._core.labels import IGNORE_INDEX
from fusedops.models.forward_context import ForwardContext
from fusedops.models.inputs import MicroBatch
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parallelization.stage_costs import layer_runs
from fusedops.models.transformer import Loss, Transformer, TransformerLayers
from fusedops.optim import global_norm
from fusedops.parallel.comm import collectives
from fusedops.parallel.data.grad_sync import GradientSync
from fusedops.parallel.mesh import Mesh
from fusedops.parallel.pipeline.driver import Driver
from fusedops.parallel.pipeline.schedules import table
from fusedops.parallel.tensor.layers import local

# The parameter that a tied head shares with the embedding.
EMBEDDING = "embedding.tokens.weight"

Computing = Callable[[], AbstractContextManager[Any]]


class Stage(Transformer):
    """A run of a model's layers, with the embedding or the head if it is the first or the last."""

    def __init__(self, model: Transformer, layers: range) -> None:
        nn.Module.__init__(self)
        self.config, self.partition = model.config, model.partition
        self.is_first, self.is_last = 0 in layers, model.config.num_layers - 1 in layers
        absent: Any = None
        has_embedding = self.is_first or (self.is_last and model.config.tied)
        self.embedding = model.embedding if has_embedding else absent
        self.layers = TransformerLayers({str(index): model.layers[str(index)] for index in layers})
        self.norm = model.norm if self.is_last else absent
        self.query_positions = model.query_positions if self.is_last else None
        self.head = model.head if self.is_last else absent
        self.train(model.training)

    def forward(  # type: ignore[override]
        self,
        stage_input: torch.Tensor,
        labels: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor | None, Loss]:
        """Return the input of the next stage, and this stage's part of the loss.

        ``stage_input`` is tokens ``[B, S]`` for the first stage, else hidden states ``[B, S, H]``.
        The last stage returns ``None`` and the loss of ``labels``; without labels its logits.
        """
        x_BSH = stage_input
        if self.is_first:
            x_BSH = self.embedding(stage_input, context)
        x_BSH, auxiliary = self.layers(x_BSH, context, self.norm, self.query_positions)
        output = self.output(x_BSH, labels, context) if self.is_last else x_BSH
        if self.is_last and labels is not None:
            return None, Loss(output, (labels != IGNORE_INDEX).sum(), auxiliary)
        nothing = torch.zeros((), device=x_BSH.device)
        return output, Loss(nothing, torch.zeros_like(nothing, dtype=torch.int64), auxiliary)


def split_into_stages(model: Transformer, config: ParallelConfig, mesh: Mesh) -> dict[int, Stage]:
    """Cut the model, changed in place; return this rank's stages by their numbers."""
    order = table(config.pipeline_schedule, config.pp, config.microbatches, config.virtual)
    runs, mine = layer_runs(model.config, config, order), order.stages_of(mesh.rank("pp"))
    return dict(zip(mine, _cut(model, [runs[stage] for stage in mine]), strict=True))


def _cut(model: Transformer, layers: Sequence[range]) -> list[Stage]:
    """Remove other processes' modules from a model, in place; return this process's stages."""
    stages = [Stage(model, run) for run in layers]
    kept = {name for stage in stages for name in stage.layers}
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    part: Any = model
    for name in [name for name in model.layers if name not in kept]:
        del part.layers[name]
    if not is_first and is_last and model.config.tied:
        for name in ("positions", "token_types", "norm"):
            setattr(part.embedding, name, None)
    elif not is_first:
        part.embedding = None
    if not is_last:
        part.norm = part.query_positions = part.head = None
    return stages


@dataclass(frozen=True, eq=False)
class PipelineEngine:
    """The stages of a process and what runs them.

    Attributes:
        tied_peer: the rank of the pipeline that also has the tied embedding, which the first and
            the last stage share; ``None`` elsewhere.
    """

    model: Transformer
    stages: Mapping[int, Stage]
    driver: Driver
    tied_peer: int | None

    @classmethod
    def of(
        cls,
        model: Transformer,
        config: ParallelConfig,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        data: Mapping[int, GradientSync],
    ) -> PipelineEngine:
        """Return the pipeline of a model that was cut."""
        for stage_data in data.values():
            for reducer in stage_data.reducers:
                reducer.defer()  # the driver knows the last backward of a step
        order = table(config.pipeline_schedule, config.pp, config.microbatches, config.virtual)
        ends = [order.rank_of(0), order.rank_of(order.stages - 1)]
        other, rank = None, mesh.rank("pp")
        if model.config.tied and ends[0] != ends[1] and rank in ends:
            other = ends[1 - ends.index(rank)]
        return cls(model, stages, Driver(order, mesh.group("pp"), stages, data), other)

    def step(
        self,
        shards: Sequence[MicroBatch],
        loss_fn: Callable[[Loss], torch.Tensor],
        computing: Computing,
        dropout: Sequence[Mapping[str, Any]],
    ) -> list[Loss]:
        """Run the schedule; ``loss_fn`` returns the scalar whose gradients a stage computes."""
        losses = self._run(self.driver.step, shards, computing, dropout, loss_fn)
        self._add_tied_gradients()
        return losses

    def forward(self, shards: Sequence[MicroBatch], computing: Computing) -> list[Loss]:
        """Run the forwards alone; as ``TrainEngine.forward``."""
        return self._run(self.driver.forward, shards, computing, [{}] * len(shards))

    def _run(
        self,
        run_schedule: Callable[..., None],
        shards: Sequence[MicroBatch],
        computing: Computing,
        dropout: Sequence[Mapping[str, Any]],
        loss_fn: Callable[[Loss], torch.Tensor] | None = None,
    ) -> list[Loss]:
        """Run a schedule of the driver; return the loss of each micro-batch."""
        losses = [self._zero_loss(shard) for shard in shards]

        def compute(
            stage: int, microbatch: int, received: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            shard, model = shards[microbatch], self.stages[stage]
            with computing():
                context = model.make_context(shard.tokens, **shard.inputs(), **dropout[microbatch])
                stage_input = shard.tokens if received is None else received
                x_BSH, loss = model(stage_input, shard.labels, context)
            share = None if loss_fn is None else loss_fn(loss)
            parts = zip(losses[microbatch], loss, strict=True)
            losses[microbatch] = Loss(*(total + part.detach() for total, part in parts))
            return x_BSH, share

        tokens = [shard.tokens for shard in shards]
        run_schedule(compute, tokens[0].device, _keys(tokens, computing))
        return losses

    def logits(self, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor | None:
        """Return the logits of tokens ``[B, S]``; ``None`` but on the last stage's rank."""
        logits: list[torch.Tensor] = []

        def compute(
            stage: int, microbatch: int, given: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, None]:
            context = self.stages[stage].make_context(tokens, **inputs)
            x_BSH, _ = self.stages[stage](tokens if given is None else given, None, context)
            if not self.stages[stage].is_last:
                return x_BSH, None
            assert x_BSH is not None
            logits.append(x_BSH)
            return None, None

        self._unsplit.forward(compute, tokens.device, _keys([tokens], nullcontext))
        return logits[0] if logits else None

    @cached_property
    def _unsplit(self) -> Driver:
        """The driver of forwards of a batch that is not split into micro-batches."""
        return Driver(replace(self.driver.table, microbatches=1), self.driver.group, self.stages)

    def _zero_loss(self, shard: MicroBatch) -> Loss:
        """Return a loss of zeros, to which stages add theirs, in the dtype of all stages."""
        dtype = dtypes.statistics_dtype(next(self.model.parameters()).dtype)
        zero = torch.zeros((), dtype=dtype, device=shard.tokens.device)
        return Loss(zero, torch.zeros_like(zero, dtype=torch.int64), zero)

    def _add_tied_gradients(self) -> None:
        """Add the gradients of the embedding that the first and the last rank share."""
        if self.tied_peer is None:
            return
        weight = self.model.embedding.tokens.weight
        if weight.grad is None:  # frozen
            return
        mine = local(weight.grad)
        group = self.driver.group
        theirs = collectives.send_receive(
            mine, group, to=self.tied_peer, source=self.tied_peer, label="tied embedding gradient"
        ).wait()
        parts = [mine, theirs] if group.rank() < self.tied_peer else [theirs, mine]
        mine.copy_(collectives.ordered_sum(parts))

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradients of all stages; a shared embedding counts once."""
        # The lower of both ranks has the first stage.
        is_copy = self.tied_peer is not None and self.tied_peer < self.driver.group.rank()
        grads = [
            parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not (is_copy and name == EMBEDDING)
        ]
        # Where the backend of the group can send it from, whatever has gradients here.
        device = next(self.model.parameters()).device
        mine = to_device(global_norm(grads), device).square()[None]
        squares = collectives.all_gather(mine, self.driver.group, label="norm").wait()
        return squares.sum().sqrt()


def _keys(tokens: Sequence[torch.Tensor], computing: Computing) -> Callable[[int], Hashable]:
    """Return what tells micro-batches apart whose hidden states have another shape or dtype."""
    device = tokens[0].device.type
    with computing():
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    training = torch.is_grad_enabled()
    return lambda microbatch: (tuple(tokens[microbatch].shape), dtype, training)
