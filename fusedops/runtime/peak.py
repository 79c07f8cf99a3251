"""Peak memory of one call, above what was allocated before it.

On the CPU torch's allocator reports each allocation and free to the profiler, also inside kernels
and compiled code; the peak is the largest running sum. Memory that a library allocates without
torch (oneDNN's scratchpad, the C library's own) is not in it. On CUDA torch keeps the count.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of memory that ``run`` allocates, in bytes, results included."""
    gc.collect()  # else garbage from before would count as freed by `run`
    if device.type == "cuda":
        return _peak_cuda(run, device)
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
        del result
    kineto = record.profiler
    assert kineto is not None and kineto.kineto_results is not None
    blocks = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    blocks.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for block in blocks:
        live += block.nbytes()
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Send the C++ profiler's lines on stderr (four per use in torch 2.13) nowhere."""
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(nowhere)
        os.close(saved)


def _peak_cuda(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before
