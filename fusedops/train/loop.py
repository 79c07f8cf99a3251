"""The training loop, top to bottom: batch, forward, backward, clip, step, log, validate, save."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fusedops.checkpoint import CheckpointError, GuardError
from fusedops.launch.processes import Stop, joined, outlast
from fusedops.launch.watchdog import Watch
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Log
from fusedops.train import metrics
from fusedops.train.builder import Run, prepared
from fusedops.train.config import Config, load_config
from fusedops.train.export import export
from fusedops.train.result import Result, Watcher
from fusedops.train.step import Taken, backward, evaluate, update

_log = logging.getLogger(__name__)


def train(
    source: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    watcher: Watcher | None = None,
) -> Result:
    """Train a transformer as a configuration says, from where an earlier run left off.

    Args:
        source: a TOML file, what one holds, or a ``Config``.
        overrides: ``"optimizer.lr=3e-4"`` and the like.
        watcher: is told how it goes, on the first rank.

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
    config = load_config(source, overrides)
    with Stop() as stop, joined(config.device) as ranks, prepared(config, ranks) as run:
        outlast(config.faults.timeout)
        with Watch(ranks, Path(config.out), config.faults.timeout) as watch:
            return _loop(run, stop, watch, watcher if ranks.rank == 0 else None)


def _loop(run: Run, stop: Stop, watch: Watch, watcher: Watcher | None) -> Result:
    config, loss, validation, stopped = run.config, None, None, False
    with run.ranks.together():  # what it refuses, all ranks do
        if watcher is not None:
            watcher.begin(run)
    while run.step < config.steps and not stopped:
        watch.at(run.step + 1, "step")
        began = time.perf_counter()
        with collectives.recorded() as log:
            taken = update(run, backward(run), stop=stop.asked)
        stopped, loss = taken.stop, taken.loss
        if taken.restored is not None:
            run.place(taken.restored)
            if run.metrics is not None:
                run.metrics.rewind(run.step)
            continue
        run.step, run.position = run.step + 1, run.position + config.batch
        record = _record(run, taken, log, time.perf_counter() - began)
        done, measured = run.step == config.steps, loss
        if _due(run.step, config.validation.every) or done:
            watch.at(run.step, "the validation after step")
            validation = evaluate(run)
            measured = loss if validation is None else validation
            record |= {"validation_loss": validation} if validation is not None else {}
        if run.metrics is not None:
            run.metrics.write(record)
        if watcher is not None:
            watcher.show(record)
        if _due(run.step, config.checkpoint.every) or done or stopped:
            watch.at(run.step, "the checkpoint of step")
            run.finite = math.isfinite(measured) and _has_finite_weights(run)
            _save(run, last=done or stopped)
    finished = run.step >= config.steps
    if finished and not run.finite:
        good = run.keeper.last_confirmed()
        raise GuardError(
            f"the run ended after step {run.step} with a loss or weights that are not finite; "
            + (f"the last good checkpoint is {good}" if good else "no checkpoint is good")
        )
    if finished and config.export:
        watch.at(run.step, "the export after step")
        export(run.parallel, config, first=run.ranks.rank == 0)
    return Result(run.step, finished, loss, validation, Path(config.out))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _has_finite_weights(run: Run) -> bool:
    """Return whether all weights are finite, on all ranks."""
    found = []
    for parameter in run.parallel.model.parameters():
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.append(torch.isfinite(local.detach()).all())
    return run.ranks.total(float(not torch.stack(found).all()))[0] == 0


def _record(run: Run, taken: Taken, log: Log, seconds: float) -> dict[str, Any]:
    """Return the line of a step."""
    tokens = run.config.batch * run.config.data.seq_len
    return {
        "step": run.step,
        "loss": taken.loss,
        "router_loss": taken.router_loss,
        "grad_norm": taken.grad_norm,
        "lr": taken.lr,
        "action": taken.action,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": run.flops * tokens / seconds / run.peak,
        "communication": metrics.communication_share(log, seconds),
        "memory_bytes": metrics.peak_memory(run.ranks.device),
    }


def _save(run: Run, *, last: bool) -> None:
    """Write a checkpoint, beside the next steps unless it is the last one.

    One that cannot be written is logged, and the next is tried; without the last one the run fails.
    """
    model: Any = run.parallel.model
    extra = {
        "corpus": run.corpus,
        "config": asdict(run.config),
        "model": asdict(model.config),
        "finite": run.finite,
    }
    with contextlib.suppress(CheckpointError):  # the keeper has logged it
        run.keeper.wait()  # for the one before
    try:
        run.keeper.save(run.step, data={"sequences": run.position}, extra=extra, block=last)
    except CheckpointError as error:
        if last:
            raise
        _log.warning("%s; training goes on", error)
