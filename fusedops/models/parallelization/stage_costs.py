"""Which layers each stage of a pipeline has: runs that balance the operations of a token."""

from __future__ import annotations

from typing import NamedTuple

from fusedops.models.config import TransformerConfig
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.parallel.pipeline.schedules import ScheduleTable
from fusedops.parallel.pipeline.split import at, balanced, shortest


class Costs(NamedTuple):
    """Relative costs."""

    layers: list[float]  # of each layer
    first: float  # of what stands before them
    last: float  # of what stands behind them, the loss included


def by_operations(model: TransformerConfig) -> Costs:
    """Return the multiplications and additions of a token's forward; a look-up has none."""
    products = 4 * model.query_width * model.seq_len * (0.5 if model.causal else 1.0)
    layers = [2 * model.used_weights(index) + products for index in range(model.num_layers)]
    return Costs(layers, 0.0, 2.0 * model.output(own_weight=True).total)


def layer_runs(
    model: TransformerConfig, config: ParallelConfig, order: ScheduleTable
) -> list[range]:
    """Return the layers of each stage of a schedule."""
    if config.pipeline_cuts is not None:
        return at(config.pipeline_cuts, model.num_layers, order.stages)
    if config.pipeline_balance == "layers":
        return balanced([1.0] * model.num_layers, order.stages)
    costs = by_operations(model)
    return shortest(costs.layers, order, first=costs.first, last=costs.last)
