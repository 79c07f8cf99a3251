"""A copy engine without threads, whose schedule is drawn: for the fuzzer.

Copies start in any order and are made in pieces, some at each call of the engine: every moment at
which a copy could be under way is one at which it may be. The same seed gives the same schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.runtime.copy_engine import CopyTimeoutError

PIECES = 3


@dataclass(eq=False)
class _Copy:
    source: torch.Tensor
    target: torch.Tensor
    after: _Copy | None
    lost: bool
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

    def __init__(self, seed: int, *, loses: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._loses = loses
        self._copies: list[_Copy] = []

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, after: Any = None
    ) -> Any:
        self._some()
        made = _Copy(
            source, target, after[-1] if after else None, self._random.random() < self._loses
        )
        self._copies.append(made)
        return made

    def done(self, ticket: Any) -> bool:
        self._some()
        return bool(ticket.done)

    def wait(self, ticket: Any, seconds: float) -> None:
        while not ticket.done:
            ready = self._ready()
            if not ready:
                raise CopyTimeoutError("lost")
            self._random.choice(ready).advance()

    finish = wait

    def mark(self) -> None:
        return None

    def _ready(self) -> list[_Copy]:
        self._copies = [copy for copy in self._copies if not copy.done]
        return [
            each
            for each in self._copies
            if not each.lost and (each.after is None or each.after.done)
        ]

    def _some(self) -> None:
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 5))):
            ready = self._ready()
            if ready:
                self._random.choice(ready).advance()
