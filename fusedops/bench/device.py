"""This machine as a device of the planner: ``fusedops bench device``.

Peak rates are those of ``limits.py``. The efficiencies of ``step_time`` are fitted on training
steps of small models that are run here. On a CPU the other cores are busy with such steps
meanwhile, as they are when ranks train there: clocks and memory are shared.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusedops.bench import machine
from fusedops.bench.calibration import calibrate
from fusedops.bench.limits import measure_limits
from fusedops.bench.results import dtype_name
from fusedops.bench.small_models import SmallModel, shape_of_step, training_step
from fusedops.bench.teams import Team, TeamSetting, interleaved
from fusedops.models import ParallelConfig
from fusedops.planner import Device, StepShape, load_device
from fusedops.planner.communication import CommunicationModel
from fusedops.planner.device import DeviceEfficiency, DeviceLinks, DeviceMemory
from fusedops.planner.step_time import step_time
from fusedops.runtime.timer import clock_for

# Constants that steps of one process tell.
FITTED = (
    *("products", "inner", "outer", "attention", "elementwise", "optimizer", "layer_seconds"),
    *("host_seconds", "microbatch_seconds", "step_seconds"),
)
# Those that steps of two processes tell, where the machine has cores for them; else they keep their
# usual values.
FITTED_TOGETHER = (
    *("node", "overlap", "zero_gather", "sequence", "overlap_microbatches", "stage_wait"),
    "collective_seconds",
)
_TOGETHER: tuple[dict[str, Any], ...] = (
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "overlap_microbatches": True},
    {"cp": 2},
    {"pp": 2, "microbatches": 4},
)
_SEQUENCES, _TOKENS = 8, 128  # of their steps
_WARM_UP = 2
# Where the fit begins on a CPU. There the host is the device: nothing is waited for.
_CPU_START = {
    "products": 0.7,
    "inner": 16,
    "outer": 16,
    "attention": 0.3,
    "elementwise": 0.6,
    "optimizer": 0.6,
    "stage_wait": 0.05,
    "accumulation": 12,  # a copy of float32 gradients is read, added to another and written
    **dict.fromkeys(("host_seconds", "layer_seconds", "microbatch_seconds"), 1e-4),
}
# The known device whose efficiencies are the usual ones.
_USUAL = "a100-80"
# Bytes by which the bandwidth of a link is judged.
_LINK_BYTES = 16 << 20


@dataclass(frozen=True)
class DeviceStep:
    """A training step of a small model."""

    shape: StepShape  # what it computes
    seconds: float  # the median of several


@dataclass(frozen=True)
class MeasuredDevice:
    """A device, and how far its predictions are from the steps that it was fitted on."""

    device: Device  # for ``fusedops plan time --device``
    steps: tuple[DeviceStep, ...]  # that were measured
    errors: tuple[float, ...]  # of the predicted seconds, as shares


# A model, sequences and tokens of a micro-batch, and micro-batches.
Case = tuple[SmallModel, int, int, int]


def sizes(*, quick: bool = False) -> list[Case]:
    """Return what is measured."""
    shapes = (
        *((2, 1, 64, 1), (2, 4, 128, 1), (4, 4, 128, 1), (2, 2, 512, 1)),
        *((2, 8, 256, 1), (2, 2, 64, 4), (2, 1, 256, 8), (4, 16, 64, 1)),
    )
    return [
        (SmallModel("gpt2", hidden, layers, 2048), rows, tokens, parts)
        for hidden in ((128, 256) if quick else (256, 512))
        for layers, rows, tokens, parts in shapes
    ]


def measure_device(
    where: torch.device,
    dtypes: Sequence[torch.dtype],
    seconds: float,
    report: Callable[[str], None],
    *,
    links: CommunicationModel | None = None,
    quick: bool = False,
) -> MeasuredDevice:
    """Measure this machine.

    Args:
        where: the CPU, with the threads that this process has, or a GPU.
        dtypes: whose peak is measured; the first one is what the steps compute in.
        seconds: for each step.
        report: is called with what is being done.
        links: curves of ``fusedops bench communication`` on this machine; without them links
            have half of the memory's bandwidth.
        quick: smaller models.
    """
    threads, on_gpu = torch.get_num_threads(), where.type == "cuda"
    others = 0 if on_gpu else len(os.sched_getaffinity(0)) // threads - 1
    with _busy_cores(others, threads):
        report("peak rates")
        own, steps = _unfitted(where, dtypes, links), []
        for case in sizes(quick=quick):
            model, rows, tokens, _ = case
            shown = f"{model.num_layers} layers, {rows} x {tokens} tokens"
            report(f"width {model.hidden_size}, {shown}")
            steps.append(_step(case, where, dtypes[0], seconds))
    start = own.efficiency if on_gpu else replace(own.efficiency, **_CPU_START)
    measured = _fitted(own, steps, start, FITTED)
    if others < 1 or dtypes[0] != torch.float32:
        return measured
    report("two processes")
    together = _steps_of_two(threads, 1.5 * seconds, 128 if quick else 384)
    start = measured.device.efficiency
    return _fitted(measured.device, together, start, FITTED_TOGETHER, measured.steps)


def _steps_of_two(threads: int, seconds: float, width: int) -> list[DeviceStep]:
    """Measure steps of two processes, which tell of communication."""
    config = SmallModel("gpt2", width, 4, 2048).config(_TOKENS)
    layouts = [ParallelConfig(**options) for options in _TOGETHER]
    settings = [
        TeamSetting(str(options), 2, threads, partial(training_step, config, layout, _SEQUENCES))
        for options, layout in zip(_TOGETHER, layouts, strict=True)
    ]
    timed = interleaved(settings, seconds, lambda _: None)
    return [
        DeviceStep(shape_of_step(config, layout, _SEQUENCES), statistics.median(times))
        for layout, (times, _) in zip(layouts, timed, strict=True)
    ]


def _fitted(
    device: Device,
    steps: Sequence[DeviceStep],
    start: DeviceEfficiency,
    names: Sequence[str],
    others: tuple[DeviceStep, ...] = (),
) -> MeasuredDevice:
    """Return the device with those of its constants that explain the steps best.

    Its errors are those of ``others`` too, which are not fitted.
    """
    fit = [(step.shape, device, step.seconds) for step in steps]
    device = replace(device, efficiency=calibrate(fit, start, names=names))
    steps = (*others, *steps)
    errors = (step_time(step.shape, device).seconds / step.seconds - 1 for step in steps)
    return MeasuredDevice(device, steps, tuple(errors))


def _unfitted(
    where: torch.device, dtypes: Sequence[torch.dtype], links: CommunicationModel | None
) -> Device:
    """Measure peak rates; return the device with usual efficiencies."""
    limits = measure_limits(where, dtypes, clock_for(where))
    peak = {name: limit.rate for name, limit in limits.matmul.items()}
    peak.setdefault("bfloat16", peak[dtype_name(dtypes[0])])
    here, on_gpu = machine.machine(where), where.type == "cuda"
    threads = max(1, here.threads)
    return Device(
        name=here.name if on_gpu else f"{here.name}, {threads} threads",
        memory=DeviceMemory(_memory(where, threads), limits.copy.rate),
        peak=peak,
        links=_links(where, threads, limits.copy.rate, links),
        efficiency=load_device(_USUAL).efficiency,
        threads=0 if on_gpu else threads,
        sources={
            "peak": f"measured products; {torch.__version__}",
            "memory": "measured copy",
            "links": "measured collectives" if links else "half of the copy's bandwidth, assumed",
        },
    )


@contextmanager
def _busy_cores(processes: int, threads: int) -> Iterator[None]:
    """Keep other cores busy with training steps while the block runs."""
    # Large enough for its activations to leave the cache.
    config = SmallModel("gpt2", 512, 4, 2048).config(256)
    step = partial(training_step, config, ParallelConfig(), 8)
    with ExitStack() as stack:
        teams = [Team(TeamSetting("other cores", 1, threads, step)) for _ in range(processes)]
        for team in teams:
            stack.callback(team.close)
        for team in teams:
            team.keep_busy()
        yield


def _memory(where: torch.device, threads: int) -> int:
    """Return the bytes of a GPU, or of the memory that threads of a CPU have in proportion."""
    if where.type == "cuda":
        return int(torch.cuda.get_device_properties(where).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total * threads // max(threads, len(os.sched_getaffinity(0)))


def _links(
    where: torch.device, threads: int, copy: float, links: CommunicationModel | None
) -> DeviceLinks:
    """Return the links of a machine without a network: nodes are as far as its own devices."""
    count = torch.cuda.device_count() if where.type == "cuda" else 0
    curves = links.curves if links else {}
    rates = [
        2 * (ranks - 1) / ranks * _LINK_BYTES / curve.seconds(_LINK_BYTES)
        for (collective, _, text), curve in curves.items()
        if collective == "all_reduce" and (ranks := int(text)) > 1
    ]
    rate, usual = max(rates, default=copy / 2), load_device(_USUAL).efficiency
    # ``step_time`` takes a share of these; what was measured is that share.
    return DeviceLinks(
        devices_per_node=count or max(1, len(os.sched_getaffinity(0)) // threads),
        node=rate / usual.node,
        network=rate / usual.network,
        host=copy,
        host_memory=copy,
    )


def _step(case: Case, where: torch.device, dtype: torch.dtype, seconds: float) -> DeviceStep:
    """Measure a training step: forward, backward, clipping and AdamW."""
    model, rows, tokens, parts = case
    config, parallel = model.config(tokens), ParallelConfig(microbatches=parts)
    step = training_step(config, parallel, rows * parts, device=where, dtype=dtype)
    for _ in range(_WARM_UP):
        step()
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times) < 3:
        begin = time.perf_counter()
        step()  # the loss as a number waits for a GPU
        times.append(time.perf_counter() - begin)
    precision = "float32" if dtype == torch.float32 else "half"
    shape = shape_of_step(config, parallel, rows * parts, precision)
    return DeviceStep(shape, statistics.median(times))
