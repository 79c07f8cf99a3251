"""Copies in the background, to host memory and back: the only file that knows streams and threads.

``CopyEngine`` is all that the rest asks for. ``CudaEngine`` answers with two streams and pinned
memory. ``HostEngine`` runs the same protocol with threads, for tensors that are in host memory
already; its copies can be told to come late, in any order, or never, so that what is built on the
protocol is tested without a GPU: order, reuse of buffers, and what happens when a copy is lost.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class CopyTimeoutError(RuntimeError):
    """A copy did not finish in the time that it was given."""


class CopyEngine(Protocol):
    """Copies bytes between a device and host memory, in the background.

    A ticket stands for a copy. Source and target must live, and the source must not be written to,
    until ``done`` says so or ``finish`` returns.
    """

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return new host memory, uint8 ``[nbytes]``, that copies can reach in the background."""

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, *, leaves: bool, after: Any = None
    ) -> Any:
        """Start a copy of what is computed so far, after that of another ticket; return a ticket.

        Args:
            source: uint8.
            target: uint8, of the same size.
            leaves: whether it goes from the device to the host.
            after: a ticket, or ``None``.
        """

    def done(self, ticket: Any) -> bool:
        """Return whether a copy has finished. Does not wait."""

    def wait(self, ticket: Any, seconds: float) -> None:
        """Let what the caller computes next come after the copy.

        Raises:
            CopyTimeoutError: where this waits for the copy itself, and it does not finish.
        """

    def finish(self, ticket: Any, seconds: float) -> None:
        """Return when the copy has finished.

        Raises:
            CopyTimeoutError: it does not.
        """


class CudaEngine:
    """Two streams of a CUDA device, one for each direction.

    Args:
        device: whose copy engines to use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in (True, False)}

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, *, leaves: bool, after: Any = None
    ) -> Any:
        """Put the copy on the stream of its direction; the ticket is an event."""
        stream = self._streams[leaves]
        # The source is written, and the target's memory was last read, on the caller's stream.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def done(self, ticket: Any) -> bool:
        """Return whether the event has happened."""
        return bool(ticket.query())

    def wait(self, ticket: Any, seconds: float) -> None:
        """Let the caller's stream wait; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def finish(self, ticket: Any, seconds: float) -> None:
        """Look at the event until it has happened."""
        until = time.monotonic() + seconds
        while not ticket.query():
            if time.monotonic() > until:
                raise _lost(seconds)
            time.sleep(20e-6)


class HostEngine:
    """Threads that copy within host memory.

    Args:
        workers: number of threads; copies of one direction may overtake each other with several.
        delay: called with the number of each copy, returns the seconds that it is late, or ``None``
            for a copy that is never made.
    """

    def __init__(
        self, *, workers: int = 1, delay: Callable[[int], float | None] | None = None
    ) -> None:
        self._workers = concurrent.futures.ThreadPoolExecutor(
            workers, thread_name_prefix="fusedops-copy"
        )
        self._delay = delay
        self._count = 0
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory from the system: what torch's allocator counts is the "device" here."""
        if nbytes == 0:  # the system has no such memory
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, *, leaves: bool, after: Any = None
    ) -> Any:
        """Hand the copy to a thread; the ticket is a future."""
        assert source.nbytes == target.nbytes and source.is_contiguous() and target.is_contiguous()
        with self._lock:
            number, self._count = self._count, self._count + 1
        late = self._delay(number) if self._delay is not None else 0.0
        if late is None:
            return concurrent.futures.Future()

        # Let go of before the ticket says that it is done: its owner counts on the memory then.
        ends = [target, source]

        def run() -> None:
            if after is not None:
                after.result()
            if late:
                time.sleep(late)
            # Not copy_: threads of torch's own would take the cores that compute.
            ctypes.memmove(ends[0].data_ptr(), ends[1].data_ptr(), ends[0].nbytes)
            ends.clear()

        return self._workers.submit(run)

    def done(self, ticket: Any) -> bool:
        """Return whether the thread is through with it."""
        return bool(ticket.done())

    def wait(self, ticket: Any, seconds: float) -> None:
        """Wait: what is computed next is computed by this thread."""
        self.finish(ticket, seconds)

    def finish(self, ticket: Any, seconds: float) -> None:
        """Wait for the thread."""
        try:
            ticket.result(seconds)
        except concurrent.futures.TimeoutError:
            raise _lost(seconds) from None


def engine_for(device: torch.device) -> CopyEngine:
    """Return the engine of a device."""
    return CudaEngine(device) if device.type == "cuda" else HostEngine()


def _lost(seconds: float) -> CopyTimeoutError:
    return CopyTimeoutError(
        f"offload: a copy between device and host memory has not finished in {seconds:g} s"
    )
