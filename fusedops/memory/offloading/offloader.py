"""Offloads tensors to host memory in the forward and fetches them before the backward needs them.

    put      a buffer of the pool; the copy starts; the device's memory is let go when it is done
    prefetch when the backward reaches a layer, the copies of that layer and the next ones start
    get      the caller comes after the copy; a tensor that has not left yet is simply given

No memory is reused while a copy reads or writes it: an offloaded tensor stays alive until its copy
is done, a fetched one as well even if nobody needs it any more, and a buffer cools in the pool
(``pool.py``). ``_core/copy_engine.py`` does the copies.
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
from fusedops._core.copy_engine import CopyEngine, CopyTimeoutError, copy_engine
from fusedops._core.deprecation import Renamed, renamed
from fusedops.memory.offloading.pool import BufferReuseError, Pool
from fusedops.memory.saved_tensors import SharedStorage


@renamed(ahead=Renamed("prefetch_depth"))
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
class _Leaving:
    """A copy to the host, and its source, which stays alive until the copy is done."""

    ticket: Any
    source: torch.Tensor | None


class OffloadedStorage(SharedStorage):
    """Device memory that is, or will be, in a host buffer. ``Offloader.put`` creates it."""

    leaving: _Leaving  # from when its copy has started

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
        self.here: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = buffer
        self.tickets: list[Any] = []  # of all copies that touch the buffer
        self.coming: tuple[torch.Tensor, Any] | None = None
        self.checksum: int | None = None

    def make(self) -> torch.Tensor:
        """Return the memory, uint8, on the device."""
        return self._offloader.get(self)

    def __del__(self) -> None:
        if self.buffer is not None:
            self._offloader.dropped.append((self.buffer, self.tickets, self.coming))


class Offloader:
    """Moves memory of one device."""

    def __init__(self, device: torch.device, settings: OffloadSettings) -> None:
        self._device = device
        self._settings = settings
        self._engine = settings.engine(device)
        self._pool = Pool(self._engine, check=settings.check, limit=settings.host_bytes)
        self._leaving: deque[_Leaving] = deque()
        self._coming: list[tuple[torch.Tensor, Any]] = []
        # Buffer, tickets and copy back of memory that nobody can ask for any more. The garbage
        # collector may drop it at any moment: it is looked at later.
        self.dropped: deque[tuple[torch.Tensor, list[Any], tuple[torch.Tensor, Any] | None]] = (
            deque()
        )
        self._group = Group(None)
        self.moved_bytes = 0

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory in the pool."""
        return self._pool.nbytes

    @property
    def in_flight(self) -> int:
        """The number of copies that are not known to be done."""
        self._let_go()
        return len(self._leaving) + len(self._coming)

    def new_group(self) -> None:
        """Begin another layer."""
        if self._group.members:
            self._group = Group(self._group)

    def put(self, tensor: torch.Tensor, module: str = "") -> OffloadedStorage:
        """Let the memory of a tensor leave.

        Raises:
            MemoryError: there is no host memory for it; nothing has changed then.
            CopyTimeoutError: a copy that should have made room does not finish.
        """
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage())
        self._let_go()
        buffer = self._pool.take(memory.nbytes)
        away = OffloadedStorage(tensor, self, module, buffer, self._group)
        if self._settings.check:
            away.checksum = _checksum(memory)
        ticket = self._engine.copy(memory, buffer[: memory.nbytes], to_host=True)
        away.tickets.append(ticket)
        away.leaving = _Leaving(ticket, memory)
        self._leaving.append(away.leaving)
        self.moved_bytes += memory.nbytes
        self._group.members.append(weakref.ref(away))
        self._wait_for_room(module)
        return away

    def get(self, away: OffloadedStorage) -> torch.Tensor:
        """Return the memory on the device, for whatever the caller computes next.

        Raises:
            CopyTimeoutError: its copy does not finish.
            BufferReuseError: with ``check``: other bytes came back than had left.
        """
        self._let_go()
        self._prefetch(away.group)
        if away.here is not None:
            return away.here
        assert away.buffer is not None
        if away.leaving.source is not None:  # it has not left yet: it stays
            away.here = away.leaving.source
            self._pool.give_back(away.buffer, *away.tickets)
            away.buffer = None
            return away.here
        self._start(away)
        assert away.coming is not None
        target, ticket = away.coming
        self._await(self._engine.wait, ticket, away.module, "back")
        self._coming.append(away.coming)  # on a stream: the caller waits, the host does not
        away.coming = None
        if away.checksum is not None and _checksum(target) != away.checksum:
            raise BufferReuseError(
                f"offload: other bytes came back than had left (module {away.module!r}, "
                f"{target.nbytes} bytes): their buffer was used again too early"
            )
        return target

    def _prefetch(self, group: Group | None) -> None:
        for _ in range(1 + self._settings.prefetch_depth):
            if group is None:
                return
            if not group.reached:
                group.reached = True
                for member in reversed(group.members):
                    away = member()
                    if away is not None:
                        self._start(away)
            group = group.before

    def _start(self, away: OffloadedStorage) -> None:
        """Let memory come back, unless it does already or has not left."""
        if away.coming is not None or away.here is not None or away.leaving.source is not None:
            return
        assert away.buffer is not None
        nbytes = away.nbytes
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        ticket = self._engine.copy(
            away.buffer[:nbytes],
            target,
            to_host=False,
            after=(self._engine.mark(), away.leaving.ticket),
        )
        away.tickets.append(ticket)
        away.coming = (target, ticket)

    def _let_go(self) -> None:
        done = self._engine.done
        while self.dropped:
            buffer, tickets, coming = self.dropped.popleft()
            self._pool.give_back(buffer, *tickets)
            if coming is not None:
                self._coming.append(coming)
        for copy in self._leaving:
            if done(copy.ticket):
                copy.source = None
        self._leaving = deque(copy for copy in self._leaving if copy.source is not None)
        self._coming = [copy for copy in self._coming if not done(copy[1])]

    def _wait_for_room(self, module: str) -> None:
        in_flight = sum(copy.source.nbytes for copy in self._leaving if copy.source is not None)
        while in_flight > self._settings.in_flight_bytes and self._leaving:
            oldest = self._leaving.popleft()
            assert oldest.source is not None
            self._await(self._engine.finish, oldest.ticket, module, "out")
            in_flight -= oldest.source.nbytes
            oldest.source = None

    def _await(
        self, wait: Callable[[Any, float], None], ticket: Any, module: str, way: str
    ) -> None:
        try:
            wait(ticket, self._settings.timeout)
        except CopyTimeoutError as error:
            raise CopyTimeoutError(f"{error} (on the way {way}, module {module!r})") from None


def _checksum(memory: torch.Tensor) -> int:
    return zlib.crc32(memory.cpu().numpy().data)
