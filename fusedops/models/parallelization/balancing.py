"""The step of loss-free balancing for a model that processes share: once per optimizer step.

Layers count the choices of their routers (``nn.BalancingBias``); here the counts of all processes
that see other tokens are added, in one communication for all layers. They are integers, so the
biases are the same bits on every process and for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn

from fusedops.models.transformer import Layer
from fusedops.nn import MoE
from fusedops.ops import update_balancing_bias
from fusedops.parallel.comm import collectives


def balance(model: nn.Module, group: dist.ProcessGroup | None, *, stepped: bool) -> None:
    """Move the biases by the counts since the last call, and reset the counts.

    Args:
        model: with layers whose routers have biases; others are left alone.
        group: the processes that see other tokens of this step, ``None``: there is one.
        stepped: whether the optimizer made its step: else the counts are discarded.
    """
    layers = _layers(model)
    if not layers:
        return
    counters = [layer.balancing for layer in layers if layer.balancing is not None]
    if stepped:
        counts = torch.stack([counter.tokens_per_expert for counter in counters])
        if group is not None:
            counts = collectives.all_reduce(counts, group, label="tokens of experts").wait()
        for layer, counter, row in zip(layers, counters, counts, strict=True):
            assert isinstance(layer.feed_forward, MoE) and layer.feed_forward.gate is not None
            bias = layer.feed_forward.gate.e_score_correction_bias
            assert bias is not None
            update_balancing_bias(bias, row, rate=counter.rate)
    for counter in counters:
        counter.tokens_per_expert.zero_()


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Forget what is counted inside: forwards that no step follows."""
    counters = [layer.balancing for layer in _layers(model) if layer.balancing is not None]
    before = [counter.tokens_per_expert.clone() for counter in counters]
    try:
        yield
    finally:
        for counter, counts in zip(counters, before, strict=True):
            counter.tokens_per_expert.copy_(counts)


def _layers(model: nn.Module) -> list[Layer]:
    layers = (module for module in model.modules() if isinstance(module, Layer))
    return [layer for layer in layers if layer.balancing is not None]
