"""Host memory that is used again, and never while a copy is under way.

A buffer comes back with the tickets of the copies that read or write it, and is free when all of
them are done. With ``check`` free buffers are filled with a poison (0xFF, which is NaN in every
floating dtype): whoever reads a buffer after giving it back reads NaN, and a buffer that is not
all poison when it is taken again was written to while it was free.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.runtime.copy_engine import CopyEngine
from fusedops.runtime.host_memory import available_bytes

POISON = 0xFF
_GRAIN = 4096


class BufferReuseError(RuntimeError):
    """A buffer was read or written while it was free, or by two at once."""


class Pool:
    """Buffers of an engine, at most ``limit`` bytes in all.

    ``check`` poisons what is free, and looks at it when it is taken.
    """

    def __init__(
        self, engine: CopyEngine, *, check: bool = False, limit: int | None = None
    ) -> None:
        self._engine = engine
        self._check = check
        self._limit = limit
        self._free: dict[int, list[torch.Tensor]] = {}
        self._cooling: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes that nobody uses.

        Raises:
            MemoryError: the limit, or the memory of the host, does not allow another buffer.
            BufferReuseError: with ``check``: a free buffer was written to.
        """
        size = -(-nbytes // _GRAIN) * _GRAIN
        self.cool()
        free = self._free.get(size)
        if free:
            buffer = free.pop()
            if self._check and not bool((buffer == POISON).all()):
                raise BufferReuseError(
                    f"offload: a buffer of {size} bytes was written to while it was free"
                )
            return buffer
        if self._limit is not None and self.nbytes + size > self._limit:
            raise MemoryError(
                f"offload: {self.nbytes} bytes of host memory are in use, {size} more are wanted, "
                f"and host_bytes allows {self._limit}"
            )
        available = available_bytes()
        if available is not None and size > available:
            raise MemoryError(
                f"offload: {size} bytes of host memory are wanted, and {available} are available"
            )
        buffer = self._engine.buffer(size)
        self.nbytes += size
        return buffer

    def give_back(self, buffer: torch.Tensor, *tickets: Any) -> None:
        """Take a buffer back; it is free when the copies are done."""
        self._cooling.append((buffer, tickets))

    def cool(self) -> None:
        """Free the buffers whose copies are done."""
        warm = []
        for buffer, tickets in self._cooling:
            if all(map(self._engine.done, tickets)):
                self._release(buffer)
            else:
                warm.append((buffer, tickets))
        self._cooling = warm

    def _release(self, buffer: torch.Tensor) -> None:
        if self._check:
            buffer.fill_(POISON)
        self._free.setdefault(buffer.numel(), []).append(buffer)
