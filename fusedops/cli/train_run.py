"""What ``fusedops train`` does behind its command line: processes, progress, memory.

The memory of a run is compared with what the machine has, by the planner's estimate.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import TimeRemainingColumn

from fusedops import train
from fusedops._core import checks, env
from fusedops.cli.errors import print_message
from fusedops.launch import job
from fusedops.launch.config_table import unknown
from fusedops.models import ParallelConfig
from fusedops.planner import Estimate, Layout, TrainingShape, estimate
from fusedops.runtime.host_memory import available_bytes
from fusedops.terminal import files
from fusedops.terminal.progress import activity, make_bar
from fusedops.terminal.sizes import parse_bytes, show_bytes
from fusedops.train.builder import Run
from fusedops.train.progress import figures

_ADVICE = "make batch smaller or parallel.microbatches larger, or find layouts by fusedops plan"
# An estimate can be wrong, but not by this factor: above it a run is refused.
_IMPOSSIBLE = 2.0


def check_memory(run: Run) -> str | None:
    """Return a warning where a run's estimate exceeds the memory that this process can have.

    One of more than twice what the machine, or the GPU, has in all is an ``InputError``.
    """
    peak, available = estimated_bytes(run), _available(run)
    if peak is None or available is None or peak <= available:
        return None
    if peak > _IMPOSSIBLE * _total(run):
        raise train.InputError(f"{compared(peak, available)}: {_ADVICE}")
    return f"{compared(peak, available)}, which may not be enough: {_ADVICE}"


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


def assignments(path: Path) -> list[str]:
    """Return the first layout of a plan that fits as overrides of a configuration."""
    record = files.read_json(path)
    layouts = record.get("layouts") if isinstance(record, dict) else None
    rows = [row for row in layouts if isinstance(row, dict)] if isinstance(layouts, list) else []
    layout = next((row.get("layout") for row in rows if row.get("fits", True)), None)
    if not isinstance(layout, dict):
        raise files.UserError(f"{path} has no layout that fits: fusedops plan --json writes one")
    parallel = {field.name for field in fields(ParallelConfig)}
    known = [*Layout().options(), *parallel]
    for key in layout:
        if key not in known:
            raise files.UserError(f"{path}: {unknown(key, known, 'layout')}")
    for name in ("dp", "micro_batch", "microbatches"):
        if name not in layout:
            raise files.UserError(f"{path}: layout.{name} is missing: give it a value")
    try:
        Layout.of(**layout)
    except (ValueError, TypeError) as error:
        raise files.UserError(f"{path}: {error}") from None
    words = str(layout.get("recompute", "none")).split("+")
    # Fused kernels save no scores.
    words = [word for word in words if word != "scores"] or ["none"]
    values = {name: layout[name] for name in parallel & set(layout)}
    values["recompute"] = "+".join(words)
    given = [
        f"parallel.{name}={json.dumps(value)}"  # of these types TOML writes what JSON does
        for name, value in sorted(values.items())
        if value is not None
    ]
    sequences = layout["dp"] * layout["micro_batch"] * layout["microbatches"]
    return [f"batch={sequences}", *given]


def start(config: str, overrides: list[str], processes: int, restarts: int, stop_code: int) -> None:
    """Start the processes and leave with their exit code."""
    job.join_job()
    place = env.launched()
    if place is not None:
        raise files.UserError(
            f"--processes and --restarts start processes, and the launcher has started {place[1]} "
            "already: leave them out, or start one process on each machine"
        )
    train.load_config(config, overrides)  # reports a mistake before any process starts
    cores = os.cpu_count() or processes
    if processes > cores:
        print(
            f"fusedops: {processes} processes share the {cores} cores of this machine, which makes "
            f"steps slow; with --processes {cores} or fewer each has a core of its own",
            file=sys.stderr,
        )
    given = [part for assignment in overrides for part in ("--set", assignment)]
    arguments = ["train", config, *given, "--stop-code", str(stop_code)]
    raise SystemExit(train.launch(processes, arguments, restarts=restarts, stop_code=stop_code))


def run(config: str, overrides: list[str], stop_code: int) -> None:
    """Train in this process; leave with a code where it was stopped or memory is exhausted."""
    logging.basicConfig(format="fusedops: %(message)s", level=logging.WARNING)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash in C tells where
    progress = _ProgressPrinter()
    try:
        with progress:
            result = train.train(config, overrides, callback=progress)
    except (MemoryError, RuntimeError) as error:
        message = out_of_memory(error, progress.run)
        if message is None:
            raise
        print_message(f"fusedops: error: {message}")
        raise SystemExit(1) from None
    if progress.run is not None:
        print_message(_ending(result))
    if not result.finished and stop_code:
        raise SystemExit(stop_code)


def _ending(result: train.TrainResult) -> str:
    if not result.finished:
        return f"stopped at step {result.step} and saved; the same command resumes from there"
    if result.loss is None:
        return f"all {result.step} steps were done before: {result.folder}"
    losses = f"loss {result.loss:.4f}"
    if result.validation_loss is not None:
        losses += f", validation {result.validation_loss:.4f}"
    return f"done: {result.step} steps, {losses}: {result.folder}"


class _ProgressPrinter:
    """A progress bar on a terminal, else a line each ``log.every`` steps."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self._preparation = ExitStack()
        self._lines = train.ProgressLines()
        self._bar: Any = None

    def __enter__(self) -> _ProgressPrinter:
        what = "reading the text and building the model"
        self._preparation.enter_context(activity(what, visible=env.is_first()))
        return self

    def __exit__(self, *_: object) -> None:
        self._preparation.close()
        if self._bar is not None:
            self._bar.stop()

    def begin(self, run: Run) -> None:
        """Tell what is trained, and from which step it resumes."""
        self._preparation.close()
        self.run = run
        warning = check_memory(run)
        self._lines.begin(run)
        if warning:
            print_message(warning)
        if sys.stderr.isatty():
            self._bar = make_bar(TimeRemainingColumn())
            self._bar.add_task("", total=run.config.steps, completed=run.step)
            self._bar.start()

    def show(self, record: Mapping[str, Any]) -> None:
        """Print the figures of a step."""
        if self._bar is None:
            self._lines.show(record)
            return
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=record["step"], description=figures(record))
