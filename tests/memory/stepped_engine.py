"""Copy engines for tests: one without threads, whose schedule is drawn, and one that is watched.

Copies start in any order and are made in pieces, some at each call of the engine: every moment at
which a copy could be under way is one at which it may be. The same seed gives the same schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.runtime.copy_engine import HostCopyEngine

PIECES = 3


@dataclass(eq=False)
class _Copy:
    source: torch.Tensor
    target: torch.Tensor
    after: _Copy | None
    pieces: int = 0

    @property
    def done(self) -> bool:
        return self.pieces == PIECES

    def advance(self) -> None:
        begin, end = (len(self.source) * i // PIECES for i in (self.pieces, self.pieces + 1))
        self.target[begin:end] = self.source[begin:end]
        self.pieces += 1


class SteppedEngine:
    """A ``CopyEngine`` that makes pieces of copies when it is asked anything."""

    pins_memory = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._copies: list[_Copy] = []

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, after: Any = None
    ) -> Any:
        self._some()
        self._copies.append(_Copy(source, target, after[-1] if after else None))
        return self._copies[-1]

    def done(self, ticket: Any) -> bool:
        self._some()
        return bool(ticket.done)

    def wait(self, ticket: Any, seconds: float) -> None:
        while not ticket.done:
            self._random.choice(self._ready()).advance()

    finish = wait

    def mark(self) -> None:
        return None

    def _ready(self) -> list[_Copy]:
        self._copies = [copy for copy in self._copies if not copy.done]
        return [copy for copy in self._copies if copy.after is None or copy.after.done]

    def _some(self) -> None:
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 5))):
            if ready := self._ready():
                self._random.choice(ready).advance()


class WatchedEngine(HostCopyEngine):
    """Knows the memory on the device that was copied, and the order of copies and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.out: dict[int, torch.UntypedStorage] = {}
        self.back: dict[int, torch.UntypedStorage] = {}

    def copy(self, source: Any, target: Any, *, to_host: bool, after: Any = None) -> Any:
        storage = (source if to_host else target).untyped_storage()
        (self.out if to_host else self.back)[storage._cdata] = storage
        self.order.append("out" if to_host else "back")
        return super().copy(source, target, to_host=to_host, after=after)

    def wait(self, ticket: Any, seconds: float) -> None:
        self.order.append("wait")
        super().wait(ticket, seconds)

    @property
    def nbytes(self) -> int:
        """The bytes on the device of what has come back."""
        return sum(storage.nbytes() for storage in self.back.values())
