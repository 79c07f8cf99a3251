"""Kernels over lists of tensors: one launch, whose programs find their tensor in a table.

A row of the table is a tensor: its address in int64, and numbers. Programs are dealt out by a
second table of (tensor, block of it) pairs, which depends on sizes alone. Both are made on the
host. ``on_device`` caches their copies on the device, where nothing writes to them: a step whose
tensors have the same addresses copies nothing. Other copies go through pinned memory, without a
host sync.

Each replay of a CUDA graph repeats the copy from the pinned memory of the capture: ``Captures``
keeps that memory alive.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

BLOCK = 1024  # elements of a program
_MOST_COPIES = 64
_CAPTURES_AHEAD = 4  # graphs that may be captured with no eager step between them


class _Copy(NamedTuple):
    table: torch.Tensor
    stream: int
    written: torch.cuda.Event | None


class Captures:
    """Tables that captured launches read: they live as long as their owner, an optimizer.

    Pinned memory cannot be allocated in a capture before torch 2.10: the steps before, inside of
    ``active``, reserve what the tables of a few captures take.
    """

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []  # on the device and in pinned memory
        self._reserved: torch.Tensor | None = None
        self._step_bytes = 0  # bytes of the tables of one step

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Keep here what is captured in this context; reserve memory for a capture otherwise."""
        token = _ACTIVE.set(self)
        self._step_bytes = 0
        try:
            yield
        finally:
            _ACTIVE.reset(token)
        needed = _CAPTURES_AHEAD * self._step_bytes
        reserved = 0 if self._reserved is None else self._reserved.nbytes
        if reserved < needed and not capturing(device):
            self._reserved = _staging(needed, device)

    def count(self, table: torch.Tensor) -> None:
        """Note that a step reads a table: a capture of the same step may have to copy it."""
        self._step_bytes += _aligned(table.nbytes)

    def copy(self, table: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Capture a copy of a host table; each replay repeats it."""
        size = _aligned(table.nbytes)
        if self._reserved is None or self._reserved.nbytes < size:
            self._reserved = _staging(size, device)
        staging, self._reserved = self._reserved[: table.nbytes], self._reserved[size:]
        placed = _send(_filled(staging, table), device)
        self.tables += [staging, placed]
        return placed


_LOCK = threading.Lock()
_copies: collections.OrderedDict[Hashable, _Copy] = collections.OrderedDict()
# Of calls that no optimizer makes: nothing tells when their graphs end.
_OF_PROCESS = Captures()
_ACTIVE: contextvars.ContextVar[Captures | None] = contextvars.ContextVar("captures", default=None)


class PointerTable:
    """The table of the tensors of one launch: int64 rows on the host, and numbers of elements."""

    def __init__(self, rows: torch.Tensor, sizes: tuple[int, ...], device: torch.device) -> None:
        self.rows, self.sizes, self.device = rows, sizes, device
        self._placed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stream = 0

    def set_column(self, column: int, values: torch.Tensor) -> None:
        """Write a column; where it had other values the device gets a new copy of the table."""
        if not torch.equal(self.rows[:, column], values):
            self.rows[:, column] = values
            self._placed = None

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table, and its blocks as ``blocks`` does, on the device."""
        here, captured = _stream(self.device), capturing(self.device)
        if self._placed is not None and (captured or self._stream == here):
            captures = _captures()
            captures.count(self.rows)
            if captured:
                captures.tables += self._placed
            return self._placed
        placed = on_device(self.rows, self.device), blocks(self.sizes, self.device)
        if not captured:
            self._placed, self._stream = placed, here
        return placed


def addresses(*lists: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int64 ``[tensors, lists]`` on the host; 0 where a list is empty."""
    count = len(lists[0])
    columns = [[tensor.data_ptr() for tensor in tensors] or [0] * count for tensors in lists]
    return torch.tensor(columns, dtype=torch.int64).t().contiguous()


def vectorizes(*tensors: torch.Tensor) -> bool:
    """Whether a tensor, and others of its size, may be read by vectors of 16 bytes to the end."""
    return all(tensor.data_ptr() % 16 == 0 and tensor.numel() % 16 == 0 for tensor in tensors)


def blocks(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int32 ``[programs, 2]``: for each program its tensor and its block of it."""
    return on_device(functools.partial(_host_blocks, sizes), device, contents=("blocks", sizes))


def _host_blocks(sizes: tuple[int, ...]) -> torch.Tensor:
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    block = torch.arange(int(counts.sum())) - first[tensor]
    return torch.stack([tensor, block], dim=1).to(torch.int32)


@functools.cache
def of_dtype(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of which a kernel uses the type alone."""
    return torch.zeros(1, dtype=dtype, device=device)


def on_device(table: Any, device: torch.device, *, contents: Hashable = None) -> torch.Tensor:
    """Return the copy of a host table on a device: an earlier one, if its contents are the same.

    Nobody may write to the copy. In a capture a table that was not copied before becomes part of
    the graph. ``table`` is contiguous, or makes the table of ``contents``; of a table these are its
    bytes.
    """
    captures, captured = _captures(), capturing(device)
    if isinstance(table, torch.Tensor):
        contents = table.dtype, tuple(table.shape), table.numpy().tobytes()
        captures.count(table)
    key = device, contents
    with _LOCK:
        copy = _copies.get(key)
        if copy is not None:
            _copies.move_to_end(key)
    if copy is None:
        made = table if isinstance(table, torch.Tensor) else table()
        if captured:
            return captures.copy(made, device)
        placed = _send(_filled(_staging(made.nbytes, device), made), device)
        copy = _Copy(placed, _stream(device), _written(device))
        with _LOCK:
            _copies[key] = copy
            while len(_copies) > _MOST_COPIES:
                _copies.popitem(last=False)
    elif captured:
        captures.tables.append(copy.table)
    elif copy.written is not None and copy.stream != _stream(device):
        here = torch.cuda.current_stream(device)
        here.wait_event(copy.written)
        copy.table.record_stream(here)
    return copy.table


def capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _captures() -> Captures:
    return _ACTIVE.get() or _OF_PROCESS


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _staging(size: int, device: torch.device) -> torch.Tensor:
    """Return bytes on the host from which a copy to the device waits for nothing."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _filled(staging: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return staging.view(table.dtype).view(table.shape).copy_(table)


def _send(staging: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy pinned memory to a device; torch's allocator does not reuse it before the copy ends."""
    return torch.empty_like(staging, device=device).copy_(staging, non_blocking=True)


def _written(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
