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

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import ComputeSpan, Pending

T = TypeVar("T")
# Yields the name of its next phase, and returns the tensors that its backward starts from.
Phases: TypeAlias = Generator[str, None, tuple[torch.Tensor, T]]
_Start: TypeAlias = Callable[[torch.Tensor], Pending]


def run_interleaved(halves: Sequence[Phases[T]], *, lead: int) -> list[tuple[torch.Tensor, T]]:
    """Run two computations in alternating phases; ``lead`` phases of the first before the second.

    Returns the results of both; the caller must use the first tensor of each. While communications
    are recorded, the log has a computation for each phase, forward and backward, named by the half
    and the
    phase: ``"half 0: norm"``.
    """
    trace = _Trace()
    running = {number: _Running(number, half, trace) for number, half in enumerate(halves)}
    assert len(running) == 2
    first, second = running.values()
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
        span = self._trace.begin(f"half {self._number}: {self._next}")
        try:
            self._next = next(self._phases)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
        self._trace.end(span)


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

    def begin(self, label: str) -> ComputeSpan | None:
        """Mark the start of a phase."""
        if not self._on:
            return None
        span, back = ComputeSpan(label), ComputeSpan(f"{label}, backward")
        self._back = back
        if self._link is not None:
            self._link = _Tick.apply(self._link, back, "end")
        span.mark("start")
        return span

    def end(self, span: ComputeSpan | None) -> None:
        """Mark the end of a phase."""
        if span is None:
            return
        span.mark("end")
        if self._link is not None:
            self._link = _Tick.apply(self._link, self._back, "start")

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


class PendingTensor:
    """A tensor that is being communicated, in the forward or in the backward."""

    def __init__(self, tensor: torch.Tensor, forward: _Start, backward: _Start) -> None:
        self._exchange = _TensorExchange(forward, backward)
        self._ticket = begin(self._exchange, tensor)

    def wait(self) -> torch.Tensor:
        """Return the result; its backward starts to communicate the gradient."""
        return end(self._exchange, self._ticket)[0]


def start_to_tensor_parallel(
    input: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool
) -> PendingTensor:
    """Start ``to_tensor_parallel`` of ``tensor/layers.py``."""
    return PendingTensor(input, _gather(group, sequence), _sum(group, sequence))


def start_from_tensor_parallel(
    partial: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool
) -> PendingTensor:
    """Start ``from_tensor_parallel`` of ``tensor/layers.py``."""
    return PendingTensor(partial, _sum(group, sequence), _gather(group, sequence))


class _TensorExchange:
    """An ``AsyncExchange`` of one tensor: a collective in the forward, another in the backward."""

    def __init__(self, forward: _Start, backward: _Start) -> None:
        self._forward, self._backward = forward, backward
        self._pending: Any = None

    def start(self, *tensors: torch.Tensor) -> None:
        # Detached: the result of ``finish`` must not be a tensor of the graph already.
        self._pending = self._forward(tensors[0].detach())

    def finish(self) -> tuple[torch.Tensor, ...]:
        pending, self._pending = self._pending, None
        return (pending.wait(),)

    def start_backward(self, *grads: torch.Tensor) -> None:
        self._pending = self._backward(grads[0])

    finish_backward = finish


def _gather(group: dist.ProcessGroup, sequence: bool) -> _Start:
    """Return what starts an all-gather; nothing where tokens are not sharded."""
    if sequence:
        return lambda tensor: collectives.all_gather(tensor, group, dim=-2)
    return lambda tensor: Pending(lambda: tensor)


def _sum(group: dist.ProcessGroup, sequence: bool) -> _Start:
    """Return what starts a reduce-scatter; an all-reduce where tokens are not sharded."""
    if sequence:
        return lambda tensor: collectives.reduce_scatter(tensor, group, dim=-2)
    return lambda tensor: collectives.all_reduce(
        tensor.clone(memory_format=torch.contiguous_format), group
    )
