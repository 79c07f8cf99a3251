"""Whole parameters of a sharded model, one at a time, for files that other programs read."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from fusedops._core import checks
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.transformer import Transformer
from fusedops.parallel.collective_errors import gather_objects
from fusedops.parallel.comm import collectives


class ParameterGatherer:
    """The parameters of a model; stages of a pipeline send theirs to the process that writes.

    Every process makes one, and reads the same names in the same order.

    Raises:
        ValueError: the model is one stage of a pipeline, and the engine does not know the others.
    """

    def __init__(self, engine: TrainEngine) -> None:
        model = engine.model
        self.parameters = dict(model.named_parameters())
        self.group: Any = None  # of the stages
        if engine.pipeline is None:
            if isinstance(model, Transformer) and len(model.layers) < model.config.num_layers:
                expected = "the TrainEngine that parallelize returned, for a stage of a pipeline"
                checks.fail("save_huggingface", "model", expected, "its Transformer alone")
            return
        self.group = engine.pipeline.driver.group
        self.device = next(model.parameters()).device
        mine = {name: (p.shape, p.dtype) for name, p in self.parameters.items()}
        stages = gather_objects(mine, self.group)
        self.shapes = {name: shape for stage in stages for name, shape in stage.items()}
        # The first stage sends the embedding that the first and the last one share.
        self.owners = {
            name: rank for rank, stage in reversed(list(enumerate(stages))) for name in stage
        }
        # Pipelines of other data parallel ranks have no process that writes.
        self.sends = 0 in dist.get_process_group_ranks(self.group)

    def read(self, name: str) -> torch.Tensor | None:
        """Return the unsharded parameter on its own stage and on the process that writes."""
        parameter: Any = None
        if name in self.parameters:
            parameter = self.parameters[name].detach()
            parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if self.group is None:
            return parameter
        owner, rank = self.owners[name], self.group.rank()
        if owner == 0 or rank not in (0, owner) or not self.sends:
            return parameter
        to, source = (0, None) if rank == owner else (None, owner)
        if parameter is None:
            shape, dtype = self.shapes[name]
            parameter = torch.empty(shape, dtype=dtype, device=self.device)
        return collectives.send_receive(
            parameter, self.group, to=to, source=source, label="weights"
        ).wait()
