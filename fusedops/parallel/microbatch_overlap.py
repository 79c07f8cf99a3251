"""Two computations run in alternating phases: one communicates while the other computes.

A computation is a generator. It starts a communication (``start_communication``), yields, and waits
for the result in its next phase; what the other computation runs in between overlaps it.

The backward has the same phases in reverse: autograd runs the most recently created node that is
ready, and the two computations do not depend on each other. A communication between two phases lies
between their backwards: the later phase starts it, the earlier one waits for it.

Reference: Ren et al.: PanGu-Sigma, arXiv:2303.10845; Jangda et al.: CoCoNet, ASPLOS 2022.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain, cycle
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.comm.collectives import Pending, computing
from fusedops.parallel.tensor.layers import TRANSPOSES, start

T = TypeVar("T")
# Yields the name of its next phase.
Phases: TypeAlias = Generator[str, None, T]


def run_interleaved(halves: Sequence[Phases[T]], *, lead: int) -> list[T]:
    """Run two computations in alternating phases; ``lead`` phases of the first before the second.

    Returns the results of both. A log of communications names each phase: ``"half 0: norm"``.
    """
    results: dict[int, T] = {}
    names = ["begin", "begin"]
    for half in chain([0] * lead, cycle((1, 0))):
        if len(results) == 2:
            break
        if half in results:
            continue
        with computing(f"half {half}: {names[half]}"):
            try:
                names[half] = next(halves[half])
            except StopIteration as stop:
                results[half] = stop.value
    return [results[0], results[1]]


def start_communication(
    name: str, tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> Pending:
    """Start ``communicate`` of ``tensor/layers.py``; the gradient is communicated in two steps.

    Without a group the result is ``tensor``.
    """
    if group is None:
        return Pending(lambda: tensor)
    exchange = _TensorExchange(name, group)
    ticket = begin(exchange, tensor)
    return Pending(lambda: end(exchange, ticket)[0])


class _TensorExchange:
    """An ``AsyncExchange`` of one tensor: a collective in the forward, another in the backward."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._name, self._group = name, group

    def start(self, *tensors: torch.Tensor) -> None:
        # Detached: the result of ``finish`` must not be a tensor of the graph already.
        self._pending = start(self._name, tensors[0].detach(), self._group)

    def finish(self) -> tuple[torch.Tensor, ...]:
        return (self._pending.wait(),)

    def start_backward(self, *grads: torch.Tensor) -> None:
        self._pending = start(TRANSPOSES[self._name], grads[0], self._group)

    finish_backward = finish
