"""Background copies between a device and host memory: the one file that knows streams and threads.

``CopyEngine`` is the protocol that offloading and the offloaded optimizer use. ``CudaCopyEngine``
has two streams and pinned memory. In ``HostCopyEngine`` the "device" is host memory; tests can
delay, reorder or drop its copies. Users of the protocol are thus tested without a GPU: order of
copies, reuse of buffers, and what happens when a copy is lost.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch


class CopyError(RuntimeError):
    """A copy did not happen; what its target holds is unknown."""


class CopyTimeoutError(CopyError):
    """A copy did not finish in the time that it was given."""


@runtime_checkable
class CopyEngine(Protocol):
    """Copies between a device and host memory, in the background.

    A ticket stands for a copy. Source and target must live, the source must not be written to and
    the target must not be read, until ``done`` says so or ``finish`` returns.
    """

    pins_memory: bool  # whether copies run in the background only from pinned host memory

    def mark(self) -> Any:
        """Return a mark of all that the calling thread has asked the device to compute."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return new host memory, uint8 ``[nbytes]``, that copies can reach in the background."""

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        to_host: bool,
        after: Sequence[Any] | None = None,
    ) -> Any:
        """Start a copy between tensors of one shape; return its ticket.

        ``after`` has marks and tickets of what must have happened before; by default a mark of now.
        """

    def done(self, ticket: Any) -> bool:
        """Return whether a copy has finished. Does not wait."""

    def wait(self, ticket: Any, seconds: float) -> None:
        """Let what the caller computes next come after the copy.

        Raises ``CopyTimeoutError`` where this waits for the copy itself, and it does not finish.
        """

    def finish(self, ticket: Any, seconds: float | None = None) -> None:
        """Wait for the copy; raise ``CopyError``, or ``CopyTimeoutError`` after so many seconds."""


def finish_all(engine: CopyEngine, copies: Iterable[Callable[[], Any]]) -> None:
    """Start copies and return when all have ended; raise the first ``CopyError`` only then.

    Others may still be writing to memory that the caller would use again after an error.
    """
    tickets: list[Any] = []
    failed: CopyError | None = None
    try:
        try:
            for start in copies:
                tickets.append(start())
        finally:
            for ticket in tickets:
                try:
                    engine.finish(ticket)
                except CopyError as error:
                    failed = failed or error
        if failed is not None:
            raise failed
    finally:
        del failed  # its traceback refers to this frame: a cycle would keep the memory


class CudaCopyEngine:
    """Two streams of a CUDA device, one for each direction; tickets and marks are events."""

    pins_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}
        self._lock = threading.Lock()

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        to_host: bool,
        after: Sequence[Any] | None = None,
    ) -> torch.cuda.Event:
        # The source is written, and the target's memory was last read, on the caller's stream.
        events = (self.mark(),) if after is None else after
        stream = self._streams[to_host]
        with self._lock, torch.cuda.stream(stream), torch.no_grad():
            for event in events:
                stream.wait_event(event)
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def done(self, ticket: torch.cuda.Event) -> bool:
        return bool(ticket.query())

    def wait(self, ticket: torch.cuda.Event, seconds: float) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def finish(self, ticket: torch.cuda.Event, seconds: float | None = None) -> None:
        try:
            if seconds is None:
                ticket.synchronize()
                return
            until = time.monotonic() + seconds
            while not ticket.query():
                if time.monotonic() > until:
                    raise _timed_out(seconds)
                time.sleep(20e-6)
        except CopyError:
            raise
        except RuntimeError as error:
            raise CopyError(f"a copy between GPU and host failed: {error}") from error


class HostCopyEngine:
    """Copies within host memory; tickets are futures.

    Args:
        workers: threads that copy contiguous memory of the same size; copies of one direction may
            overtake each other with several. 0: the caller copies, before ``copy`` returns.
        delay: called with the number of each copy of the threads, returns the seconds that it is
            late, or ``None`` for a copy that is never made.
    """

    pins_memory = False

    def __init__(
        self, *, workers: int = 1, delay: Callable[[int], float | None] | None = None
    ) -> None:
        self._workers = (
            concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="fusedops-copy")
            if workers
            else None
        )
        self._delay = delay
        self._count = 0
        self._lock = threading.Lock()

    def mark(self) -> Any:
        return _FINISHED

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory from the system: what torch's allocator counts is the "device" here."""
        if nbytes == 0:  # the system has no such memory
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        to_host: bool,
        after: Sequence[Any] | None = None,
    ) -> Any:
        if self._workers is None:
            for ticket in after or ():
                ticket.result()
            return self._copy_now(lambda: target.detach().copy_(source.detach()))
        assert source.nbytes == target.nbytes and source.is_contiguous() and target.is_contiguous()
        with self._lock:
            number, self._count = self._count, self._count + 1
        late = self._delay(number) if self._delay is not None else 0.0
        if late is None:
            return concurrent.futures.Future()

        # Dropped before the ticket says that it is done: its owner counts on the memory then.
        tensors = [target, source]

        def run() -> None:
            for ticket in after or ():
                ticket.result()
            if late:
                time.sleep(late)
            # Not copy_: threads of torch's own would take the cores that compute.
            ctypes.memmove(tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[0].nbytes)
            tensors.clear()

        return self._workers.submit(run)

    def done(self, ticket: Any) -> bool:
        return bool(ticket.done())

    def wait(self, ticket: Any, seconds: float) -> None:
        self.finish(ticket, seconds)

    def finish(self, ticket: Any, seconds: float | None = None) -> None:
        try:
            ticket.result(seconds)
        except concurrent.futures.TimeoutError:
            assert seconds is not None
            raise _timed_out(seconds) from None

    def _copy_now(self, copy: Callable[[], Any]) -> Any:
        copy()
        return _FINISHED


def copy_engine(device: torch.device) -> CopyEngine:
    return CudaCopyEngine(device) if device.type == "cuda" else HostCopyEngine()


_FINISHED: concurrent.futures.Future[None] = concurrent.futures.Future()
_FINISHED.set_result(None)


def _timed_out(seconds: float) -> CopyTimeoutError:
    return CopyTimeoutError(
        f"offload: a copy between device and host memory has not finished in {seconds:g} s"
    )
