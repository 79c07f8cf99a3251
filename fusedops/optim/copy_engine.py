"""Copies between device and host that overlap computation: one small interface.

``CudaEngine`` contains all CUDA calls of the offloaded optimizer. ``HostEngine`` follows the same
protocol if the "device" is host memory; tests make its copies late, unordered or broken.

The protocol: ``fetch`` and ``push`` may return before anything is copied. Until ``wait`` of the
ticket has returned, the target must not be read, and neither source nor target may be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch


class CopyError(RuntimeError):
    """A copy failed; the contents of its target are undefined."""


class Ticket(Protocol):
    """A requested copy."""

    def wait(self) -> None:
        """Return when the copy is done.

        Raises:
            CopyError: it failed.
        """


def carry_out(copies: Iterable[Callable[[], Ticket]]) -> None:
    """Request copies and return when all have ended; raise after that if one failed.

    Otherwise other copies could still write to memory that the caller reuses after an error.

    Args:
        copies: functions, each of which requests a copy from an engine.

    Raises:
        CopyError: the first that failed.
    """
    tickets: list[Ticket] = []
    failed: CopyError | None = None
    try:
        for ask in copies:
            tickets.append(ask())
    finally:
        for ticket in tickets:
            try:
                ticket.wait()
            except CopyError as error:
                failed = failed or error
    if failed is not None:
        raise failed


class CopyEngine(Protocol):
    """Performs copies."""

    def ready(self) -> Any:
        """Return a mark of all that the calling thread has asked the device to compute."""

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Ticket:
        """Copy a device's tensor to the host, once the device has computed up to the mark."""

    def push(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        """Copy to the device; what the calling thread asks it to compute later comes after."""

    def new_buffer(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory of a tensor's shape and strides, as this engine likes it."""


class _Done:
    def wait(self) -> None:
        return None


class HostEngine:
    """Copies where host and device are the same memory: at once, on the calling thread.

    Args:
        run: how a copy is carried out: called with a function that copies, it returns the ticket.
            What tests replace.
    """

    def __init__(self, run: Callable[[Callable[[], None]], Ticket] | None = None) -> None:
        self._run = run or self._at_once

    def ready(self) -> None:
        """Return nothing: a host has computed what it was asked to."""
        return None

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Ticket:
        """Copy ``device`` to ``host``."""
        return self._run(lambda: _copy(host, device))

    def push(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        """Copy ``host`` to ``device``."""
        return self._run(lambda: _copy(device, host))

    def new_buffer(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty_like(like, dtype=dtype, device="cpu")

    @staticmethod
    def _at_once(copy: Callable[[], None]) -> Ticket:
        copy()
        return _Done()


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise CopyError(f"a copy between GPU and host failed: {error}") from error


class CudaEngine:
    """Copies on two streams of their own, one for each direction, between GPU and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._lock = threading.Lock()

    def ready(self) -> torch.cuda.Event:
        """Return an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Ticket:
        """Copy a gradient out; its memory is not reused before."""
        with self._lock, torch.cuda.stream(self._out):
            self._out.wait_event(after)
            host.copy_(device, non_blocking=True)
            device.record_stream(self._out)
            return _CudaTicket(self._out.record_event())

    def push(self, device: torch.Tensor, host: torch.Tensor) -> Ticket:
        """Copy a parameter in, after the kernels that read it and before those that will."""
        current = torch.cuda.current_stream(self._device)
        with self._lock, torch.cuda.stream(self._back):
            self._back.wait_stream(current)
            device.copy_(host, non_blocking=True)
            event = self._back.record_event()
        current.wait_event(event)
        return _CudaTicket(event)

    def new_buffer(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory, which copies need to overlap kernels."""
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=True)


def engine_for(device: torch.device) -> CopyEngine:
    """Return the engine of a device.

    Raises:
        ValueError: there is none.
    """
    if device.type == "cuda":
        return CudaEngine(device)
    if device.type == "cpu":
        return HostEngine()
    raise ValueError(f"OffloadedAdamW: parameters must be on cuda or cpu, got {device}")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
