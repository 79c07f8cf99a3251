"""The training loop, top to bottom: batch, forward, backward, clip, step, log, validate, save."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusedops.checkpoint import CheckpointError, GuardError
from fusedops.launch.processes import StopSignals, initialize_distributed, set_collective_timeout
from fusedops.launch.watchdog import Watchdog
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Log
from fusedops.parallel.tensor.layers import local
from fusedops.train import metrics, resume
from fusedops.train.builder import Run, build_run
from fusedops.train.config import Config, load_config
from fusedops.train.export import export
from fusedops.train.progress import ProgressCallback, ProgressLines, TrainResult
from fusedops.train.step import StepResult, backward, evaluate, update

_log = logging.getLogger(__name__)
# Skipped steps in a row with which a run must not end.
_SKIPPED_AT_THE_END = 2


def train(
    source: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    callback: ProgressCallback | None = None,
) -> TrainResult:
    """Train a transformer as a configuration says, from where an earlier run left off.

    Args:
        source: a TOML file, what one holds, or a ``Config``.
        overrides: ``"optimizer.lr=3e-4"`` and the like.
        callback: is called before the first step and after each, on the first rank; by default
            ``ProgressLines``, which prints a line on stderr each ``log.every`` steps.

    Returns:
        What it came to, on all ranks.

    Raises:
        ValueError: something that was asked for cannot be; on all ranks, before the first step.
        CheckpointError: no checkpoint is good, or the last one could not be written.
        GuardError: training must not go on, or it ended with what is not finite.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from fusedops.train import train
        >>> text = Path(tempfile.mkdtemp(), "text.txt")
        >>> _ = text.write_text("abc " * 400)
        >>> train({"out": f"{text.parent}/run", "steps": 2, "batch": 2, "device": "cpu",
        ...        "model": {"preset": "tiny-gpt2"}, "log": {"peak_tflops": 1.0},
        ...        "data": {"train": [str(text)], "seq_len": 16}}).finished
        True
    """
    config, callback = load_config(source, overrides), callback or ProgressLines()
    with (
        StopSignals() as stop,
        initialize_distributed(config.device) as ranks,
        build_run(config, ranks) as run,
    ):
        set_collective_timeout(config.faults.timeout)
        with _unfrozen(), Watchdog(ranks, Path(config.out), config.faults.timeout) as watchdog:
            return _loop(run, stop, watchdog, callback if ranks.rank == 0 else None)


def _loop(
    run: Run, stop: StopSignals, watchdog: Watchdog, callback: ProgressCallback | None
) -> TrainResult:
    config, recorder = run.config, run.recorder
    loss, validation, stopped, fault = None, None, False, ""
    is_frozen = gc.get_freeze_count() > 0  # it visits every frozen object, so not in each step
    with run.ranks.together():  # what it refuses, all ranks do
        if callback is not None:
            callback.begin(run)
    while run.step < config.steps and not stopped:
        watchdog.set_phase(run.step + 1, "step")
        began = time.perf_counter()
        with (
            collectives.recorded() as log,
            # With the validation and the checkpoint after it
            contextlib.nullcontext() if recorder is None else recorder.step(run.step + 1, log),
        ):
            with contextlib.nullcontext() if run.arena is None else run.arena.step():
                with run.memory.step(run.step + 1):
                    losses = backward(run)
                with run.section("optimizer"):
                    result = update(run, losses, stop=stop.asked)
            stopped, loss = result.stop, result.loss
            if result.restored is not None:
                run.resume_from(result.restored)
                if run.metrics is not None:
                    run.metrics.rewind(run.step)
                continue
            run.step, run.position = run.step + 1, run.position + config.batch
            run.skipped = 0 if result.finite else run.skipped + 1
            record = _record(run, result, log, time.perf_counter() - began)
            if not is_frozen:
                gc.freeze()  # what lives until the end is not looked at again: that pauses a rank
                is_frozen = True
            done, losses_of_step = run.step == config.steps, [loss]
            if _due(run.step, config.validation.every) or done:
                watchdog.set_phase(run.step, "the validation after step")
                with run.section("validation"):
                    validation = evaluate(run)
                if validation is not None:
                    losses_of_step.append(validation)
                    record["validation_loss"] = validation
            if run.metrics is not None:
                run.metrics.write(record)
            if callback is not None:
                callback.show(record)
            if _due(run.step, config.checkpoint.every) or done or stopped:
                watchdog.set_phase(run.step, "the checkpoint of step")
                with run.section("checkpoint"):
                    fault = _fault(run, losses_of_step, done=done)
                    _save(run, finite=not fault, last=done or stopped)
    if recorder is not None:
        recorder.flush()
    finished = run.step >= config.steps
    if finished and fault:
        good = run.checkpointer.last_confirmed()
        raise GuardError(
            f"the run ended after step {run.step} with {fault}; "
            + (f"the last good checkpoint is {good}" if good else "no checkpoint is good")
            + "; with a smaller optimizer.lr "
            + ("the same command resumes from there" if good else "start a new run")
        )
    if finished and config.export:
        watchdog.set_phase(run.step, "the export after step")
        has_tokenizer = resume.has_tokenizer(run.description)
        export(run.parallel, config, first=run.ranks.rank == 0, has_tokenizer=has_tokenizer)
    return TrainResult(run.step, finished, loss, validation, Path(config.out))


@contextlib.contextmanager
def _unfrozen() -> Iterator[None]:
    """Undo the loop's ``gc.freeze``: frozen objects would still exist when the process ends.

    C extensions that count their objects then (triton's) print pages about leaks.
    """
    frozen_before = gc.get_freeze_count()
    try:
        yield
    finally:
        if frozen_before == 0:
            gc.unfreeze()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _fault(run: Run, losses: Sequence[float], *, done: bool) -> str:
    """Return why a checkpoint must not pass for a good one; empty where it is one.

    A step that was skipped alone is usual: the loss scale of float16 has grown too far, or a batch
    was bad. If the run ends with several, nothing says that it would have recovered.
    """
    parameters = run.parallel.model.parameters()
    finite = torch.stack([torch.isfinite(local(param).detach()).all() for param in parameters])
    spoilt_ranks = run.ranks.total(float(not finite.all()))[0]
    if spoilt_ranks or not all(map(math.isfinite, losses)):
        return "a loss or weights that are not finite"
    if done and run.skipped >= min(_SKIPPED_AT_THE_END, run.config.steps):
        return f"{run.skipped} skipped steps, whose loss or gradients were not finite"
    return ""


def _record(run: Run, result: StepResult, log: Log, seconds: float) -> dict[str, Any]:
    """Return the line of a step."""
    tokens = run.config.batch * run.config.data.seq_len
    rate = run.flops * tokens / seconds
    # The product that measured the peak may have shared the machine with other work.
    run.peak = max(run.peak, rate)
    return {
        "step": run.step,
        "loss": result.loss,
        "router_loss": result.router_loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "action": result.action,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": rate / run.peak,
        "communication": _communication(run, log, seconds),
        "memory_bytes": metrics.peak_memory(run.ranks.device),
    }


def _communication(run: Run, log: Log, seconds: float) -> float | None:
    """Return the share of the step in which this rank waited for communications.

    On a GPU, where the host does not wait, it is that of an earlier step, which the recorder has.
    """
    if run.ranks.device.type != "cuda":
        return sum(event.blocked for event in log.events) / seconds
    return None if run.recorder is None else run.recorder.blocked_share()


def _save(run: Run, *, finite: bool, last: bool) -> None:
    """Write a checkpoint; unless it is the last one, writing overlaps the next steps.

    One that cannot be written is logged, and the next is tried; without the last one the run fails.
    """
    extra = {**run.description, "finite": finite, "skipped": run.skipped}
    with contextlib.suppress(CheckpointError):  # the checkpointer has logged it
        run.checkpointer.wait()  # for the one before
    try:
        run.checkpointer.save(run.step, data={"sequences": run.position}, extra=extra, block=last)
    except CheckpointError as error:
        if last:
            raise
        _log.warning("%s; training continues", error)
