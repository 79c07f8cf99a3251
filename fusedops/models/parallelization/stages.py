"""A transformer split into the stages of a pipeline: which modules a process keeps.

A process keeps one ``Transformer`` without the modules of other stages, and a ``Stage`` for each
run of its layers, made of the same modules: parameters have the names of the unsplit model, so that
checkpoints do not depend on the stages. Embedding and head belong to the first and the last stage;
with a tied head the last one has the embedding of tokens as well.

Letters of shapes as in ``transformer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusedops._core.labels import IGNORE_INDEX
from fusedops.models.forward_context import ForwardContext
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parallelization.stage_costs import layer_runs
from fusedops.models.transformer import Loss, Transformer, TransformerLayers
from fusedops.parallel.mesh import Mesh
from fusedops.parallel.pipeline.schedules import table


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
