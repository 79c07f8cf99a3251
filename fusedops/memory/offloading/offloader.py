"""Offloads tensors to host memory in the forward and fetches them before the backward needs them.

    put      a buffer of the pool; the copy starts; the device's memory is freed when it is done
    prefetch when the backward reaches a layer, the copies of that layer and the next ones start
    get      the caller waits for the copy; a tensor whose first copy is not done stays resident

No memory is reused while a copy reads or writes it: an offloaded tensor stays alive until its copy
is done, a fetched one as well even if nobody needs it any more, and a buffer cools in the pool
(``pool.py``). ``runtime/copy_engine.py`` does the copies.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import checks
from fusedops.memory.offloading.pool import BufferReuseError, Pool
from fusedops.memory.saved_tensors import SharedStorage
from fusedops.runtime.copy_engine import CopyEngine, CopyTimeoutError, copy_engine


@dataclass(frozen=True)
class OffloadSettings:
    """How tensors are copied to host memory and back.

    Args:
        prefetch_depth: layers whose tensors are fetched before the backward reaches them.
        least_bytes: memory smaller than this stays where it is.
        in_flight_bytes: what may be leaving at once; more waits for the oldest copy. Until its copy
            is done a tensor still occupies the device.
        host_bytes: limit on host memory, or ``None``.
        timeout: seconds after which a copy is given up.
        check: the debug mode: free buffers are poisoned, and every tensor that comes back is
            compared with the one that left. Slow.
        engine: makes the copy engine of a device; for tests.

    Raises:
        TypeError: a number is no number, or ``engine`` no function.
        ValueError: a number is negative, or ``timeout`` not positive.

    Example:
        >>> import fusedops
        >>> fusedops.memory.OffloadSettings(prefetch_depth=2).prefetch_depth
        2
    """

    prefetch_depth: int = 1
    least_bytes: int = 1 << 14
    in_flight_bytes: int = 1 << 28
    host_bytes: int | None = None
    timeout: float = 60.0
    check: bool = False
    engine: Callable[[torch.device], CopyEngine] = copy_engine

    def __post_init__(self) -> None:
        op = "OffloadSettings"
        for name in ("prefetch_depth", "least_bytes", "in_flight_bytes"):
            checks.integer(op, name, getattr(self, name), least=0)
        if self.host_bytes is not None:
            checks.integer(op, "host_bytes", self.host_bytes, least=0)
        checks.positive(op, "timeout", self.timeout)
        checks.flag(op, "check", self.check)
        if not callable(self.engine):
            checks.fail_type(op, "engine", "a function of a device", self.engine)


def offload_settings_of(op: str, argument: str, given: OffloadSettings | None) -> OffloadSettings:
    """Return the settings that were given, or the default ones."""
    settings = OffloadSettings() if given is None else given
    if not isinstance(settings, OffloadSettings):
        checks.fail_type(op, argument, "OffloadSettings", settings)
    return settings


class Group:
    """What was put while one layer ran, and the group before it. Its members keep it alive."""

    def __init__(self, before: Group | None) -> None:
        self.members: list[weakref.ref[OffloadedStorage]] = []
        self.reached = False
        self._before = weakref.ref(before) if before is not None else None

    @property
    def before(self) -> Group | None:
        """The group before, if something of it is still wanted."""
        return self._before() if self._before is not None else None


@dataclass
class _Copy:
    """A copy to or from the host, and the memory on the device, which lives until it is done."""

    ticket: Any
    memory: torch.Tensor | None


class OffloadedStorage(SharedStorage):
    """Device memory that is, or will be, in a host buffer. ``Offloader.put`` creates it."""

    offload_copy: _Copy  # from when it has started

    def __init__(
        self,
        tensor: torch.Tensor,
        offloader: Offloader,
        module: str,
        buffer: torch.Tensor,
        group: Group,
    ) -> None:
        super().__init__(tensor)
        self._offloader, self.module, self.group = offloader, module, group
        self.nbytes = tensor.untyped_storage().nbytes()
        self.resident: torch.Tensor | None = None  # needed before its copy was done
        self.buffer: torch.Tensor | None = buffer
        self.tickets: list[Any] = []  # of all copies that touch the buffer
        self.prefetch: _Copy | None = None
        self.checksum: int | None = None

    def make(self) -> torch.Tensor:
        """Return the memory, uint8, on the device."""
        return self._offloader.get(self)

    def __del__(self) -> None:
        if self.buffer is not None:
            self._offloader.dropped.append((self.buffer, self.tickets, self.prefetch))


class Offloader:
    """Moves memory of one device."""

    def __init__(self, device: torch.device, settings: OffloadSettings) -> None:
        self._device = device
        self._settings = settings
        self._engine = settings.engine(device)
        self._pool = Pool(self._engine, check=settings.check, limit=settings.host_bytes)
        self._offloads: deque[_Copy] = deque()
        self._prefetches: list[_Copy] = []
        # Buffer, tickets and prefetch of storages that were collected, which can happen at any
        # moment: ``_release_done`` handles them later.
        self.dropped: deque[tuple[torch.Tensor, list[Any], _Copy | None]] = deque()
        self._group = Group(None)
        self.moved_bytes = 0

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory in the pool."""
        return self._pool.nbytes

    def new_group(self) -> None:
        """Begin another layer."""
        if self._group.members:
            self._group = Group(self._group)

    def put(self, tensor: torch.Tensor, module: str = "") -> OffloadedStorage:
        """Start to copy the memory of a tensor to the host.

        Raises:
            MemoryError: there is no host memory for it; nothing has changed then.
            CopyTimeoutError: a copy that should have made room does not finish.
        """
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage())
        self._release_done()
        buffer = self._pool.take(memory.nbytes)
        storage = OffloadedStorage(tensor, self, module, buffer, self._group)
        if self._settings.check:
            storage.checksum = _checksum(memory)
        ticket = self._engine.copy(memory, buffer[: memory.nbytes], to_host=True)
        storage.tickets.append(ticket)
        storage.offload_copy = _Copy(ticket, memory)
        self._offloads.append(storage.offload_copy)
        self.moved_bytes += memory.nbytes
        self._group.members.append(weakref.ref(storage))
        in_flight = sum(copy.memory.nbytes for copy in self._offloads if copy.memory is not None)
        while in_flight > self._settings.in_flight_bytes and self._offloads:
            oldest = self._offloads.popleft()
            assert oldest.memory is not None
            self._await(self._engine.finish, oldest.ticket, module, "out")
            in_flight -= oldest.memory.nbytes
            oldest.memory = None
        return storage

    def get(self, storage: OffloadedStorage) -> torch.Tensor:
        """Return the memory on the device, for whatever the caller computes next.

        Raises:
            CopyTimeoutError: its copy does not finish.
            BufferReuseError: with ``check``: other bytes came back than had left.
        """
        self._release_done()
        self._prefetch(storage.group)
        if storage.resident is not None:
            return storage.resident
        if storage.offload_copy.memory is not None:
            storage.resident = storage.offload_copy.memory
            assert storage.buffer is not None
            self._pool.give_back(storage.buffer, *storage.tickets)
            storage.buffer = None
            return storage.resident
        self._start(storage)
        copy = storage.prefetch
        assert copy is not None and copy.memory is not None
        self._await(self._engine.wait, copy.ticket, storage.module, "back")
        self._prefetches.append(copy)  # on a stream: the caller waits, the host does not
        storage.prefetch = None
        if storage.checksum is not None and _checksum(copy.memory) != storage.checksum:
            raise BufferReuseError(
                f"offload: other bytes came back than had left (module {storage.module!r}, "
                f"{copy.memory.nbytes} bytes): their buffer was used again too early"
            )
        return copy.memory

    def _prefetch(self, group: Group | None) -> None:
        """Start the copies back of a group, and of those before it."""
        for _ in range(1 + self._settings.prefetch_depth):
            if group is None:
                return
            if not group.reached:
                group.reached = True
                for member in reversed(group.members):
                    storage = member()
                    if storage is not None:
                        self._start(storage)
            group = group.before

    def _start(self, storage: OffloadedStorage) -> None:
        """Start the copy back, unless it has started or the memory is still on the device."""
        is_here = storage.resident is not None or storage.offload_copy.memory is not None
        if storage.prefetch is not None or is_here:
            return
        assert storage.buffer is not None
        target = torch.empty(storage.nbytes, dtype=torch.uint8, device=self._device)
        after = self._engine.mark(), storage.offload_copy.ticket
        ticket = self._engine.copy(
            storage.buffer[: storage.nbytes], target, to_host=False, after=after
        )
        storage.tickets.append(ticket)
        storage.prefetch = _Copy(ticket, target)

    def _release_done(self) -> None:
        """Free the memory of copies that are done, and give back buffers of dropped storages."""
        done = self._engine.done
        while self.dropped:
            buffer, tickets, prefetch = self.dropped.popleft()
            self._pool.give_back(buffer, *tickets)
            if prefetch is not None:
                self._prefetches.append(prefetch)
        for copy in self._offloads:
            if done(copy.ticket):
                copy.memory = None
        self._offloads = deque(copy for copy in self._offloads if copy.memory is not None)
        self._prefetches = [copy for copy in self._prefetches if not done(copy.ticket)]

    def _await(
        self, wait: Callable[[Any, float], None], ticket: Any, module: str, way: str
    ) -> None:
        try:
            wait(ticket, self._settings.timeout)
        except CopyTimeoutError as error:
            raise CopyTimeoutError(f"{error} (on the way {way}, module {module!r})") from None


def _checksum(memory: torch.Tensor) -> int:
    return zlib.crc32(memory.cpu().numpy().data)
