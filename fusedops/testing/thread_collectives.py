"""Collectives among ranks that are threads, each executed as late as it may be.

The result of a communication is undefined until it has been waited for. Here it is NaN until then,
and inputs are read as late as possible: code that reads a result too early, or overwrites an input
too early, gets other numbers than a single process, which the comparison reports. Ranks whose calls
differ in communication, reduction or sizes are an error that names both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fusedops.testing.thread_scheduler import ThreadScheduler

Tensors = list[torch.Tensor]


class CollectiveMismatchError(RuntimeError):
    """Ranks that take part in one communication do not want the same."""


@dataclass
class ThreadCall:
    """One rank's part of a communication."""

    kind: str  # a name of ``KINDS``
    inputs: Tensors  # what it gives
    outputs: Tensors  # where its results go
    detail: Any = None  # what must be the same for all: how to reduce, whose data
    sizes: tuple[int, ...] = ()  # numbers of elements that must be the same for all
    where: str = ""  # the rank and its group, for messages

    def __post_init__(self) -> None:
        written = {output.untyped_storage()._cdata for output in self.outputs if output.numel()}
        with _unobserved():
            if any(tensor.untyped_storage()._cdata in written for tensor in self.inputs):
                self.inputs = [tensor.detach().clone() for tensor in self.inputs]
            for output in self.outputs:
                _spoil(output.detach())

    def __str__(self) -> str:
        detail = "" if self.detail is None else f" ({self.detail})"
        sizes = f" of {' + '.join(map(str, self.sizes))} elements" if self.sizes else ""
        return f"{self.kind}{detail}{sizes}"


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """What a backend does itself is no operator of the rank: the rank's modes do not see it."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _spoil(given: torch.Tensor) -> None:
    """Fill a tensor with what nobody takes for a result."""
    with torch.no_grad():
        if given.dtype.is_floating_point or given.dtype.is_complex:
            given.fill_(float("nan"))
        elif given.dtype not in (torch.bool, torch.uint8):  # bytes that are something else
            given.fill_(torch.iinfo(given.dtype).min)


@dataclass
class ThreadCollective:
    """A communication of some ranks of a group."""

    expected: int  # how many take part
    calls: dict[int, ThreadCall] = field(default_factory=dict)  # by their rank in the group
    _results: dict[int, Tensors] | None = None

    def join(self, rank: int, call: ThreadCall) -> None:
        """Take a rank's part.

        Raises:
            CollectiveMismatchError: others want something else.
        """
        for other in self.calls.values():
            kinds = {call.kind, other.kind}
            same = call.kind == other.kind and call.sizes == other.sizes
            if kinds != {"send", "recv"} and not (same and call.detail == other.detail):
                raise CollectiveMismatchError(
                    f"{call.where} calls {call}, {other.where} calls {other}"
                )
        self.calls[rank] = call

    def full(self) -> bool:
        """Whether all have come."""
        return len(self.calls) == self.expected

    def results(self, rank: int) -> Tensors:
        """Return what a rank gets; all must have come."""
        if self._results is None:
            ranks = sorted(self.calls)
            call = self.calls[ranks[0]]
            kind = "send" if call.kind == "recv" else call.kind
            with torch.no_grad(), _unobserved():
                given = KINDS[kind]([self.calls[member].inputs for member in ranks], call.detail)
            self._results = dict(zip(ranks, given, strict=True))
        return self._results[rank]


class ThreadWork(dist.Work):
    """One rank's handle of a collective."""

    def __init__(self, scheduler: ThreadScheduler, collective: ThreadCollective, rank: int) -> None:
        super().__init__()
        self._scheduler, self._collective, self._rank = scheduler, collective, rank
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until all have come; then take the results."""
        if not self._done:
            call = self._collective.calls[self._rank]
            self._scheduler.wait(self._collective.full, f"waits for {call} of {call.where}")
            self._done = True
            results = self._collective.results(self._rank)
            for output, result in zip(call.outputs, results, strict=True):
                if output.numel() != result.numel() or output.dtype != result.dtype:
                    raise CollectiveMismatchError(
                        f"{call.where}, {call}: has room for {output.numel()} elements of "
                        f"{output.dtype}, and gets {result.numel()} of {result.dtype}"
                    )
                with _unobserved():
                    output.detach().copy_(result.reshape(output.shape))
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._done

    def get_future(self) -> torch.futures.Future:
        """Wait, and return a future that has ended."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._collective.calls[self._rank].outputs)
        return future


class AllOf(dist.Work):
    """Several communications as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether each has been waited for."""
        return all(work.is_completed() for work in self._works)


def _reduced(terms: Tensors, how: str) -> torch.Tensor:
    """Return the reduction of the ranks' tensors, in the order of the ranks."""
    if how == "avg":
        return _reduced(terms, "sum") / len(terms)
    operations: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functools.reduce(operations[how], terms).clone()


def _all_reduce(given: list[Tensors], how: str) -> list[Tensors]:
    return [[_reduced(list(terms), how) for terms in zip(*given, strict=True)] for _ in given]


def _reduce(given: list[Tensors], how: tuple[str, int]) -> list[Tensors]:
    reduced = _all_reduce(given, how[0])
    return [reduced[rank] if rank == how[1] else [] for rank in range(len(given))]


def _reduce_scatter(given: list[Tensors], how: str) -> list[Tensors]:
    return [[_reduced([tensors[rank] for tensors in given], how)] for rank in range(len(given))]


def _all_gather(given: list[Tensors], _: Any) -> list[Tensors]:
    return [[tensors[0].clone() for tensors in given] for _ in given]


def _gather(given: list[Tensors], root: int) -> list[Tensors]:
    everything = [tensors[0].clone() for tensors in given]
    return [everything if rank == root else [] for rank in range(len(given))]


def _all_to_all(given: list[Tensors], _: Any) -> list[Tensors]:
    return [[tensors[rank].clone() for tensors in given] for rank in range(len(given))]


def _broadcast(given: list[Tensors], root: int) -> list[Tensors]:
    return [
        [] if rank == root else [tensor.clone() for tensor in given[root]]
        for rank in range(len(given))
    ]


def _scatter(given: list[Tensors], root: int) -> list[Tensors]:
    return [[tensor.clone()] for tensor in given[root]]


def _send(given: list[Tensors], _: Any) -> list[Tensors]:
    """``given[0]`` is the sender's."""
    return [[], [tensor.clone() for tensor in given[0]]]


def _barrier(given: list[Tensors], _: Any) -> list[Tensors]:
    return [[] for _ in given]


KINDS: dict[str, Callable[[list[Tensors], Any], list[Tensors]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "send": _send,
    "barrier": _barrier,
}
