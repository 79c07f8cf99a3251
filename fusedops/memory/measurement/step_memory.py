"""``StepMemory``: what one step of a training loop allocates, by layer and kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fusedops.memory.measurement.measure import (
    MemoryReport,
    checks_of,
    close_trace,
    placed,
    state_bytes,
    summary,
    trace_of,
)
from fusedops.memory.measurement.trace import AllocationTrace, AllocationTracker


class StepMemory:
    """Records what one step of a training loop allocates, by layer and kind.

    ``report`` runs a step of its own; this class looks at one that a loop makes, with its
    micro-batches, pipeline and mesh. It needs two steps: in the first one it finds which layers
    run, and it records the second one. The step's values do not change; the recorded step takes
    longer.

    Args:
        model: that is trained, in the mode and with the policy that it has.
        optimizer: whose states are counted.

    Attributes:
        report: of the recorded step; ``None`` before. Bytes inside kernels are not in it.

    Raises:
        TypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> from fusedops.memory import StepMemory
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> memory = StepMemory(model)
        >>> with memory.prepare():
        ...     model(torch.ones(8, 64)).sum().backward()
        >>> with memory.record():
        ...     model(torch.ones(8, 64)).sum().backward()
        >>> sorted(memory.report.layers)
        ['', '0', '1']
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        checks_of("StepMemory", model, None, optimizer)
        self._model, self._optimizer = model, optimizer
        self._idle: frozenset[str] = frozenset()
        self.report: MemoryReport | None = None

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Find out which layers run in the forward and backward of the block."""
        with placed(self._model, AllocationTrace()) as places:
            yield
        self._idle = frozenset(name for name, place in places.items() if not place.ran)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the forward and backward of the block; ``report`` is set at its end."""
        trace = trace_of(self._model)
        with placed(self._model, trace, self._idle):
            with AllocationTracker(trace):
                yield
            gradients = close_trace(trace, self._model.parameters())
        states = state_bytes(self._optimizer)
        self.report = summary(self._model, trace, 0, gradients, states)
