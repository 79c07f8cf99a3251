"""Two computations run in alternating phases: one communicates while the other computes.

A computation is a generator. It starts a communication, yields, and waits for the result in its
next phase; the phase that the other computation runs in between overlaps the communication.
``start_to_tensor_parallel`` and ``start_from_tensor_parallel`` start the communications around a
tensor-parallel region (``tensor/layers.py``); ``StagedExpertParallel`` of ``expert/api.py`` is
expert parallelism in such steps.

The order of the backward follows from the autograd engine, which runs the most recently created
node that is ready. The two computations do not depend on each other, so one of them always has a
ready node, and nodes run in the reverse of the order in which they were created. Hence the backward
of a phase is a phase as well: a communication between two phases of one computation lies between
their backwards. The later phase starts it, the earlier phase waits for it, and the backward of the
other computation's phase in between overlaps it.

Reference: Ren et al.: PanGu-Sigma, arXiv:2303.10845; Jangda et al.: CoCoNet, ASPLOS 2022.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import ComputeSpan, Pending
from fusedops.parallel.tensor.layers import TRANSPOSES, start

T = TypeVar("T")
# Yields the name of its next phase, and returns the tensors that its backward starts from.
Phases: TypeAlias = Generator[str, None, tuple[torch.Tensor, T]]


def run_interleaved(halves: Sequence[Phases[T]], *, lead: int) -> list[tuple[torch.Tensor, T]]:
    """Run two computations in alternating phases; ``lead`` phases of the first before the second.

    Returns the results of both; the caller must use the first tensor of each. While communications
    are recorded, the log has a computation for each phase, forward and backward, named by the half
    and the
    phase: ``"half 0: norm"``.
    """
    trace = _Trace()
    first, second = (_Running(number, half, trace) for number, half in enumerate(halves))
    for _ in range(lead):
        first.run_phase()
    while not (first.is_done and second.is_done):
        second.run_phase()
        first.run_phase()
    (x, *more), other = first.result, second.result
    return [(trace.tied_to(x), *more), other]


class _Running:
    """A computation whose phases are being run."""

    def __init__(self, number: int, phases: Phases[Any], trace: _Trace) -> None:
        self._number, self._phases, self._trace = number, phases, trace
        self._next = "begin"
        self.is_done = False
        self.result: Any = None

    def run_phase(self) -> None:
        """Run until the generator yields or returns; do nothing if it has returned."""
        if self.is_done:
            return
        with self._trace.phase(f"half {self._number}: {self._next}"):
            try:
                self._next = next(self._phases)
            except StopIteration as stop:
                self.is_done, self.result = True, stop.value


class _Trace:
    """Marks phases, forward and backward, in the communication log if one is open.

    Each phase adds two scalars to a chain in the autograd graph, whose backwards run when the
    backward of the phase does.
    """

    def __init__(self) -> None:
        self._on = collectives.is_recorded()
        self._link: torch.Tensor | None = None
        if self._on and torch.is_grad_enabled():
            self._link = torch.zeros((), requires_grad=True)

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Mark what it encloses as a phase."""
        if not self._on:
            yield
            return
        backward = ComputeSpan(f"{label}, backward")
        if self._link is not None:
            self._link = _Tick.apply(self._link, backward, "end")
        with collectives.computing(label):
            yield
        if self._link is not None:
            self._link = _Tick.apply(self._link, backward, "start")

    def tied_to(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, connected to the chain: the backward of ``x`` runs that of the chain."""
        return x if self._link is None else _Tie.apply(x, self._link)


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, span: ComputeSpan, phase: str) -> torch.Tensor:
        ctx.span, ctx.phase = span, phase
        return link.view_as(link)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.span.mark(ctx.phase)
        return grads[0], None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
        ctx.link = link.detach()
        return x.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.zeros_like(ctx.link)


def start_to_tensor_parallel(
    input: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool
) -> Pending:
    """Start ``to_tensor_parallel`` of ``tensor/layers.py``."""
    return _start("gather_from_sequence" if sequence else "copy_to", input, group)


def start_from_tensor_parallel(
    partial: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool
) -> Pending:
    """Start ``from_tensor_parallel`` of ``tensor/layers.py``."""
    return _start("scatter_to_sequence" if sequence else "reduce_from", partial, group)


def _start(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending:
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
