"""``torch.cuda`` for devices that are not there (``stand_in_device``).

Streams run their work at once; what orders one after another is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks

from fusedops._core import backends, exchange_kernels
from fusedops.testing.stand_in_device import current, rank_device, seeing_device


class _Event:
    """An event; what was recorded before it is done. Its time is that of the host."""

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        self._has_time, self._time = enable_timing, math.nan

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()
        if not self._has_time:  # one with a time is there to be read, not to order streams
            rank_device().record("stream", "Event.record")

    def wait(self, stream: Any = None) -> None:
        rank_device().record("stream", "Event.wait")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        rank_device().record("wait", "Event.synchronize")

    def elapsed_time(self, end: _Event) -> float:
        if not (self._has_time and end._has_time) or math.isnan(self._time + end._time):
            raise RuntimeError(
                "Event.elapsed_time: both events must have been made with enable_timing=True and "
                "have been recorded"
            )
        return 1e3 * (end._time - self._time)


class _Stream:
    """A stream, which is current inside of ``torch.cuda.stream``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = rank_device().device
        self.cuda_stream = 0

    def wait_event(self, event: Any) -> None:
        rank_device().record("stream", "Stream.wait_event")

    def wait_stream(self, stream: Any) -> None:
        rank_device().record("stream", "Stream.wait_stream")

    def record_event(self, event: Any = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        rank_device().record("wait", "Stream.synchronize")

    def __enter__(self) -> _Stream:
        rank_device().streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        rank_device().streams.pop()


class _DeviceGuard:
    """Stands for ``torch.cuda.device``: another GPU is the current one inside of it."""

    def __init__(self, device: Any) -> None:
        self._device = rank_device().named(device)

    def __enter__(self) -> None:
        stand_in = rank_device()
        self._before = stand_in.device
        stand_in.device = self._device or self._before

    def __exit__(self, *error: object) -> None:
        rank_device().device = self._before


def answers(gpus: int, capability: tuple[int, int] = (9, 0)) -> dict[str, Any]:
    """Return what stands for the functions of ``torch.cuda`` on a node with so many GPUs."""
    major, minor = capability
    default_streams: dict[torch.device, _Stream] = {}

    def current_stream(device: Any = None) -> _Stream:
        mine = rank_device()
        return (
            mine.streams[-1] if mine.streams else default_streams.setdefault(mine.device, _Stream())
        )

    def properties(device: Any = None) -> Any:
        name = f"stand-in {rank_device().device}"
        sizes = {"total_memory": 80 << 30, "multi_processor_count": 132}
        return SimpleNamespace(name=name, uuid=name, major=major, minor=minor, **sizes)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpus,
        "current_device": lambda: rank_device().device.index,
        "set_device": nothing,
        "device": _DeviceGuard,
        "synchronize": lambda device=None: rank_device().record("wait", "torch.cuda.synchronize"),
        "current_stream": current_stream,
        "default_stream": current_stream,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: capability,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": nothing,
        "empty_cache": nothing,
        "memory_stats": lambda device=None: {},
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": nothing,
    }


@contextlib.contextmanager
def stand_in_cuda(gpus: int) -> Iterator[None]:
    """Let ``torch.cuda`` answer for stand-in devices, ``gpus`` of them on a node.

    It replaces attributes of torch, for all threads of the process, until it ends.
    """
    device_of, make_wrapper = backends._device, torch.Tensor._make_wrapper_subclass
    make_thread, make_hooks = threading.Thread.__init__, saved_tensors_hooks.__init__

    def host_device(args: tuple[Any, ...]) -> torch.device:
        """Return the device whose kernels run."""
        with torch._C.DisableTorchFunction():
            return device_of(args)

    def run_exchange(kernel: Callable[..., Any], *args: Any) -> Any:
        device = current()
        return kernel(*args) if device is None else device.run_exchange(kernel, *args)

    @functools.wraps(make_wrapper)
    def wrapper_on_host(*args: Any, **kwargs: Any) -> Any:
        kwargs["device"] = torch.device("cpu")
        return make_wrapper(*args, **kwargs)

    def thread_of_rank(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        make_thread(thread, *args, **kwargs)
        device, body = current(), thread.run

        def run() -> None:
            assert device is not None
            with device.copy_of().active():
                body()

        if device is not None:
            thread.run = run  # type: ignore[method-assign]

    def hooks_of_rank(hooks: Any, *callbacks: Callable[..., Any]) -> None:
        if current() is not None:
            callbacks = tuple(map(seeing_device, callbacks))
        make_hooks(hooks, *callbacks)

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in answers(gpus).items()),
        (backends, "_device", host_device),
        (exchange_kernels, "run", run_exchange),
        (torch.Tensor, "_make_wrapper_subclass", wrapper_on_host),
        (threading.Thread, "__init__", thread_of_rank),
        (saved_tensors_hooks, "__init__", hooks_of_rank),
        # torch.autograd.grad would turn the mode off for all that it calls.
        (torch.autograd, "has_torch_function", lambda *_: False),
    ]
    with contextlib.ExitStack() as patches:
        for target, name, value in replaced:
            patches.enter_context(mock.patch.object(target, name, value))
        yield
