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
    """The parameters and buffers of a model, gathered from its shards and from pipeline stages.

    Every process makes one, and reads the same names in the same order.

    Raises:
        ValueError: the model is one stage of a pipeline, and the engine does not know the others.
    """

    def __init__(self, engine: TrainEngine) -> None:
        model = engine.model
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        self.parameters |= dict(model.named_buffers())
        self.group: Any = None  # of the stages, on the pipeline of the process that writes
        if engine.pipeline is None:
            if isinstance(model, Transformer) and len(model.layers) < model.config.num_layers:
                expected = "the TrainEngine that parallelize returned, for a stage of a pipeline"
                checks.fail("save_huggingface", "model", expected, "its Transformer alone")
            return
        group: Any = engine.pipeline.driver.group
        if 0 in dist.get_process_group_ranks(group):
            self.group = group
        self.device = next(model.parameters()).device
        # The first stage sends the embedding that the first and the last one share.
        self.owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        mine = {name: (p.shape, p.dtype) for name, p in self.parameters.items()}
        for rank, stage in enumerate(gather_objects(mine, group)):
            for name, (shape, dtype) in stage.items():
                self.owners.setdefault(name, (rank, shape, dtype))

    def read(self, name: str) -> torch.Tensor | None:
        """Return the unsharded parameter on the process that writes; elsewhere it may be absent."""
        parameter: Any = None
        if name in self.parameters:
            parameter = self.parameters[name].detach()
            parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if self.group is None:
            return parameter
        owner, shape, dtype = self.owners[name]
        if owner != self.group.rank():
            parameter = torch.empty(shape, dtype=dtype, device=self.device)
        return collectives.broadcast(parameter, self.group, source=owner, label="weights").wait()
