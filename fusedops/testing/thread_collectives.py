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

    kind: str  # of ``_results_of``
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
                given = _results_of(kind, [self.calls[rank].inputs for rank in ranks], call.detail)
                # A rank may overwrite its input when it has its own result.
                clones = [[tensor.clone() for tensor in tensors] for tensors in given]
            self._results = dict(zip(ranks, clones, strict=True))
        return self._results[rank]


class ThreadWork(dist.Work):
    """One rank's handle of a collective, or of several: each with its number in the group."""

    def __init__(
        self, scheduler: ThreadScheduler, parts: Sequence[tuple[ThreadCollective, int]]
    ) -> None:
        super().__init__()
        self._scheduler, self.parts = scheduler, parts
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until all have come; then take the results."""
        if not self._done:
            for collective, rank in self.parts:
                self._finish(collective, rank)
            self._done = True
        return True

    def _finish(self, collective: ThreadCollective, rank: int) -> None:
        call = collective.calls[rank]
        self._scheduler.wait(collective.full, f"waits for {call} of {call.where}")
        for output, result in zip(call.outputs, collective.results(rank), strict=True):
            if output.numel() != result.numel() or output.dtype != result.dtype:
                raise CollectiveMismatchError(
                    f"{call.where}, {call}: has room for {output.numel()} elements of "
                    f"{output.dtype}, and gets {result.numel()} of {result.dtype}"
                )
            with _unobserved():
                output.detach().copy_(result.reshape(output.shape))

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._done

    def get_future(self) -> torch.futures.Future:
        """Wait, and return a future that has ended."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        outputs = [collective.calls[rank].outputs for collective, rank in self.parts]
        future.set_result([output for of_part in outputs for output in of_part])
        return future


def _reduced(terms: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """Return the reduction of the ranks' tensors, in the order of the ranks."""
    if how == "avg":
        return _reduced(terms, "sum") / len(terms)
    operations: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    return functools.reduce(operations[how], terms)


def _results_of(kind: str, given: list[Tensors], detail: Any) -> list[Tensors]:
    """Return what each rank gets of what all ranks give, both in the order of the ranks."""
    ranks = range(len(given))
    match kind:
        case "all_reduce":
            return [[_reduced(terms, detail) for terms in zip(*given, strict=True)]] * len(given)
        case "reduce":
            (how, root) = detail
            reduced = [_reduced(terms, how) for terms in zip(*given, strict=True)]
            return [reduced if rank == root else [] for rank in ranks]
        case "reduce_scatter":
            return [[_reduced([tensors[rank] for tensors in given], detail)] for rank in ranks]
        case "all_gather":
            return [[tensors[0] for tensors in given]] * len(given)
        case "gather":
            return [[tensors[0] for tensors in given] if rank == detail else [] for rank in ranks]
        case "all_to_all":
            return [[tensors[rank] for tensors in given] for rank in ranks]
        case "broadcast":
            return [[] if rank == detail else given[detail] for rank in ranks]
        case "scatter":
            return [[tensor] for tensor in given[detail]]
        case "send":  # the sender is the first
            return [[], given[0]]
    assert kind == "barrier"
    return [[] for _ in ranks]
