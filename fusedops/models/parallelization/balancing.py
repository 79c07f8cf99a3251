"""The step of loss-free balancing for a model that processes share: once per optimizer step.

Layers count the choices of their routers (``nn.BalancingBias``); here the counts of all processes
that see other tokens are added, in one communication for all layers. They are integers, so the
biases are the same bits on every process and for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops.models.transformer import Layer
from fusedops.nn import BalancingBias
from fusedops.ops import update_balancing_bias
from fusedops.parallel.comm import collectives


def balance(model: nn.Module, group: dist.ProcessGroup | None, *, stepped: bool) -> None:
    """Move the biases by the counts since the last call, and reset the counts.

    Args:
        model: with layers whose routers have biases; others are left alone.
        group: the processes that see other tokens of this step, ``None``: there is one.
        stepped: whether the optimizer made its step: else the counts are discarded.
    """
    counted = _counted(model)
    if not counted:
        return
    counters = [counter for _, counter in counted]
    if stepped:
        counts = torch.stack([counter.tokens_per_expert for counter in counters])
        if group is not None:
            counts = collectives.all_reduce(counts, group, label="tokens of experts").wait()
        for (moe, counter), row in zip(counted, counts, strict=True):
            update_balancing_bias(moe.gate.e_score_correction_bias, row, rate=counter.rate)
    for counter in counters:
        counter.tokens_per_expert.zero_()


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Forget what is counted inside: forwards that no step follows."""
    counters = [counter for _, counter in _counted(model)]
    before = [counter.tokens_per_expert.clone() for counter in counters]
    try:
        yield
    finally:
        for counter, counts in zip(counters, before, strict=True):
            counter.tokens_per_expert.copy_(counts)


def _counted(model: nn.Module) -> list[tuple[Any, BalancingBias]]:
    """Return the experts whose routers have biases, with the counters of their choices."""
    layers = (module for module in model.modules() if isinstance(module, Layer))
    return [
        (layer.feed_forward, layer.balancing) for layer in layers if layer.balancing is not None
    ]
