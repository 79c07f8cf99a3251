"""What memory a training run takes by the planner's estimate, and what the machine has."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fusedops._core import checks
from fusedops.runtime.host_memory import available_bytes
from fusedops.terminal.sizes import parse_bytes, show_bytes

if TYPE_CHECKING:
    from fusedops.planner import Estimate
    from fusedops.train.builder import Run

# An estimate can be wrong, but not by this factor: above it a run is refused.
_IMPOSSIBLE = 2.0


def check_memory(run: Run) -> str | None:
    """Compare the estimate of a run with the memory that this process can have.

    Returns:
        A warning where the estimate exceeds the memory, else ``None``.

    Raises:
        InputError: it exceeds twice what the machine, or the GPU, has in all.
    """
    from fusedops.train import InputError

    peak, available = estimated_bytes(run), _available(run)
    if peak is None or available is None or peak <= available:
        return None
    if peak > _IMPOSSIBLE * _total(run):
        raise InputError(f"{compared(peak, available)}: {_ADVICE}")
    return f"{compared(peak, available)}, which may not be enough: {_ADVICE}"


_ADVICE = (
    "make batch smaller or parallel.microbatches larger, or see fusedops plan for layouts that fit"
)


# What makes a part of the memory smaller, by the planner's names of the parts.
_CURES = {
    "weights": "parallel.zero = 3 or a larger parallel.tp shards them",
    "gradients": "parallel.zero = 2 shards them",
    "states": 'parallel.zero = 1, or parallel.offload = "optimizer"',
    "activations": 'parallel.recompute = "selective" or "full", or a larger parallel.microbatches',
    "communication": "a smaller parallel.bucket_bytes",
    "logits": "a larger parallel.microbatches",
}
_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_REQUEST = re.compile(f"[Tt]ried to allocate {_SIZE}")
# What the allocator had in pieces at the time of the error; later some of it has been freed.
_FREE = re.compile(f"{_SIZE} is reserved by PyTorch but unallocated")


def estimated_bytes(run: Run) -> int | None:
    """Return the planner's estimate for one process; ``None`` where it knows no such layout."""
    needed = _estimated(run)
    if needed is None:
        return None
    # Without a GPU what is offloaded is in the same memory.
    return needed.peak + (needed.host if run.ranks.device.type == "cpu" else 0)


def _estimated(run: Run) -> Estimate | None:
    from fusedops.planner import Layout, TrainingShape, estimate

    config, parallel = run.config, run.parallel.config
    model: Any = run.parallel.model.config
    precision = "float32" if config.precision.compute == "float32" else "autocast"
    offload = tuple(name for name in parallel.offload if name != "experts")
    shape = TrainingShape(
        micro_batch=config.batch // (parallel.dp * parallel.microbatches),
        seq_len=config.data.seq_len,
        precision=precision,
    )
    try:
        return estimate(model, Layout(replace(parallel, offload=offload), shape))
    except (ValueError, TypeError, checks.UnsupportedError):
        return None


def compared(peak: int | None, available: int | None) -> str:
    """Return the estimate and the memory in words."""
    needed = "no estimate" if peak is None else f"an estimated {show_bytes(peak)}"
    has = "an unknown amount" if available is None else show_bytes(available)
    return f"a step takes {needed} of memory in each process, and {has} is available"


def out_of_memory(error: BaseException, run: Run | None) -> str | None:
    """Return the line for an error that says that memory is exhausted; ``None`` for others."""
    if isinstance(error, MemoryError) and str(error):
        return str(error)  # of the offloaded optimizer, with what it needs
    exhausted = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
    if not exhausted:
        return None
    if run is None:
        return f"out of memory before the first step: {_ADVICE}"
    free = _fragmented(error)
    if free:
        return (
            f"out of memory: {free} are free, in pieces that are too small; start the job with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    advice, needed = _ADVICE, _estimated(run)
    if needed is not None:
        part = max(needed.parts, key=needed.parts.__getitem__)
        share = needed.parts[part] / needed.peak
        advice = f"{share:.0%} of it are {part}: {_CURES[part]}; or {_ADVICE}"
    return f"out of memory: {compared(estimated_bytes(run), _available(run))}; {advice}"


def _fragmented(error: BaseException) -> str:
    """Return how many bytes CUDA's allocator has free, if they are enough; else nothing."""
    request, free = _REQUEST.search(str(error)), _FREE.search(str(error))
    if request is None or free is None:
        return ""
    wanted, there = (parse_bytes(found[1].replace("bytes", "B")) for found in (request, free))
    return free[1] if there > wanted else ""


def _available(run: Run) -> int | None:
    return _total(run) if run.ranks.device.type == "cuda" else available_bytes()


def _total(run: Run) -> int:
    device = run.ranks.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
