"""Two computations run in alternating phases: one communicates while the other computes.

A computation is a generator. It starts a communication, yields, and waits for the result in its
next phase; the phase that the other computation runs in between overlaps the communication.
``start_communication`` starts those around a tensor-parallel region (``tensor/layers.py``);
``StagedExpertParallel`` of ``expert/api.py`` is expert parallelism in such steps.

The order of the backward follows from the autograd engine, which runs the most recently created
node that is ready. The two computations do not depend on each other, so one of them always has a
ready node, and nodes run in the reverse of the order in which they were created. Hence the backward
of a phase is a phase as well: a communication between two phases of one computation lies between
their backwards. The later phase starts it, the earlier phase waits for it, and the backward of the
other computation's phase in between overlaps it.

Reference: Ren et al.: PanGu-Sigma, arXiv:2303.10845; Jangda et al.: CoCoNet, ASPLOS 2022.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
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

    Returns the results of both. While communications are recorded, the log has a computation for
    each phase, named by the half and the phase: ``"half 0: norm"``.
    """
    results: dict[int, T] = {}
    names = ["begin", "begin"]

    def run_phase(half: int) -> None:
        if half in results:
            return
        with computing(f"half {half}: {names[half]}"):
            try:
                names[half] = next(halves[half])
            except StopIteration as stop:
                results[half] = stop.value

    for _ in range(lead):
        run_phase(0)
    while len(results) < 2:
        run_phase(1)
        run_phase(0)
    return [results[0], results[1]]


def start_communication(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start ``communicate`` of ``tensor/layers.py``; the gradient is communicated in two steps."""
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
