"""Which layers each stage of a pipeline has: runs that balance the operations of a token."""

from __future__ import annotations

from fusedops.models.config import TransformerConfig
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.parallel.pipeline.schedules import ScheduleTable
from fusedops.parallel.pipeline.split import at, balanced, shortest


def by_operations(model: TransformerConfig) -> tuple[list[float], float]:
    """Return the multiplications and additions of a token's forward: of each layer, of the head."""
    width = model.query_width + model.num_heads * model.value_size
    products = 2 * width * model.seq_len * (0.5 if model.causal else 1.0)
    layers = [2 * model.used_weights(index) + products for index in range(model.num_layers)]
    return layers, 2.0 * model.output(own_weight=True).total


def layer_runs(
    model: TransformerConfig, config: ParallelConfig, order: ScheduleTable
) -> list[range]:
    """Return the layers of each stage of a schedule."""
    if config.pipeline_cuts is not None:
        return at(config.pipeline_cuts, model.num_layers, order.stages)
    if config.pipeline_balance == "layers":
        return balanced([1.0] * model.num_layers, order.stages)
    layers, head = by_operations(model)
    return shortest(layers, order, last=head)
