"""Which layers of a model go to which stage of a pipeline."""

from __future__ import annotations

import torch
from torch import distributed as dist

from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parallelization.stage_costs import Costs, by_operations, measured
from fusedops.models.parallelization.stages import Stage, cut
from fusedops.models.transformer import Transformer
from fusedops.parallel.comm import collectives
from fusedops.parallel.mesh import Mesh
from fusedops.parallel.pipeline.schedules import table
from fusedops.parallel.pipeline.split import at, balanced, shortest


def split_into_stages(model: Transformer, config: ParallelConfig, mesh: Mesh) -> dict[int, Stage]:
    """Cut the model, changed in place; return this rank's stages by their numbers."""
    layers = model.config.num_layers
    order = table(config.pipeline_schedule, config.pp, config.microbatches, config.virtual)
    if config.pipeline_cuts is not None:
        runs = at(config.pipeline_cuts, layers, order.stages)
    elif config.pipeline_balance == "layers":
        runs = balanced([1.0] * layers, order.stages)
    else:
        costs = _costs(model, config, mesh)
        runs = shortest(costs.layers, order, first=costs.first, last=costs.last)
    mine = order.stages_of(mesh.rank("pp"))
    return dict(zip(mine, cut(model, [runs[stage] for stage in mine]), strict=True))


def _costs(model: Transformer, config: ParallelConfig, mesh: Mesh) -> Costs:
    """Return the costs that stages balance, the same on all processes."""
    if config.pipeline_balance == "operations":
        return by_operations(model.config)
    device, world = mesh.dense.device_type, dist.group.WORLD
    assert world is not None
    costs = torch.zeros(model.config.num_layers + 2, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        dtype = next(model.parameters()).dtype
        layers, first, last = measured(model.config, device=device, dtype=dtype)
        costs.copy_(torch.tensor([*layers, first, last]))
    *layers, first, last = collectives.broadcast(costs, world, label="costs").wait().tolist()
    return Costs(layers, first, last)
