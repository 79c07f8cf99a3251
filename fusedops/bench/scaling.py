"""What two processes of one thread reach of one process of two: ``fusedops bench scaling``.

A training step (forward, backward, clipping, AdamW) of one model in several settings, each in
processes of its own that stay. The settings are interleaved: while one makes its steps the
processes of the others wait, and each is compared with the first one round by round, so that what
disturbs the machine disturbs all.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops._core import host
from fusedops.bench.small_models import InterleavedRow, SmallModel, text_of, training_step
from fusedops.models import ParallelConfig, TransformerConfig
from fusedops.optim import AdamW
from fusedops.planner import Device, Layout, TrainingShape, step_shape, step_time

_PATIENCE = 600.0
_WARM_UP = 2


@dataclass(frozen=True)
class ScalingSetting:
    """A way of training the same model."""

    name: str  # as the table shows it
    processes: int  # how many
    threads: int  # of each
    # sizes and options of ``ParallelConfig``; ``None``: the patched model of transformers
    parallel: dict[str, Any] | None


SETTINGS = {
    entry.name: entry
    for entry in (
        ScalingSetting("one process", 1, 2, {}),
        ScalingSetting("one process, 8 parts", 1, 2, {"microbatches": 8}),
        ScalingSetting("patched transformers", 1, 2, None),
        ScalingSetting("dp 2", 2, 1, {"dp": 2}),
        ScalingSetting("dp 2, zero 1", 2, 1, {"dp": 2, "zero": 1}),
        ScalingSetting("tp 2", 2, 1, {"tp": 2}),
        ScalingSetting("tp 2, overlap_microbatches", 2, 1, {"tp": 2, "overlap_microbatches": True}),
        ScalingSetting("tp 2, sp", 2, 1, {"tp": 2, "sp": True}),
        ScalingSetting("cp 2", 2, 1, {"cp": 2}),
        ScalingSetting("pp 2", 2, 1, {"pp": 2, "microbatches": 8}),
        *(
            ScalingSetting(
                f"pp 2, {name}", 2, 1, {"pp": 2, "microbatches": 8, "pipeline_schedule": name}
            )
            for name in ("zero_bubble", "zbv")
        ),
    )
}
FIRST = "one process"


@dataclass(frozen=True)
class ScalingWork(SmallModel):
    """What is trained."""

    sequences: int  # of a step, on all processes together
    tokens: int  # of a sequence


@dataclass
class ScalingRow(InterleavedRow):
    """What a setting reached."""

    setting: ScalingSetting  # which
    tokens: int  # of a step
    seconds: list[float] = field(default_factory=list)  # of a step, of each turn
    # of the first setting's seconds to these, turn by turn: 1 is its speed
    ratios: list[float] = field(default_factory=list)
    loss: float = 0.0  # of the first step

    @property
    def tokens_of_turn(self) -> int:
        """Those of a step: ``seconds`` are of one."""
        return self.tokens


def measure(
    work: ScalingWork, names: Sequence[str], seconds: float, report: Callable[[str], None] = print
) -> list[ScalingRow]:
    """Measure interleaved settings.

    Args:
        work: what is trained.
        names: of ``SETTINGS``; the first one measured is ``FIRST``.
        seconds: for each setting, about.
        report: is called with what is being done.

    Returns:
        A row for each setting.

    Raises:
        RuntimeError: a process failed; with what it said.
    """
    chosen = [SETTINGS[name] for name in dict.fromkeys((FIRST, *names))]
    rows = [ScalingRow(setting, work.sequences * work.tokens) for setting in chosen]
    with ExitStack() as stack:
        teams = []
        for setting in chosen:
            report(f"starting {setting.name}")
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            team = _Team(setting, work, Path(folder) / "store")
            stack.callback(team.close)
            teams.append(team)
        for team, row in zip(teams, rows, strict=True):
            row.loss = team.run(_WARM_UP)[1]
        steps = [max(1, round(1.0 / max(team.run(1)[0], 1e-3))) for team in teams]
        until = time.monotonic() + seconds * len(teams)
        while time.monotonic() < until or len(rows[0].seconds) < 3:
            for team, row, count in zip(teams, rows, steps, strict=True):
                row.seconds.append(team.run(count)[0])
                row.ratios.append(rows[0].seconds[-1] / row.seconds[-1])
            report(f"{len(rows[0].seconds)} rounds")
    return rows


def predicted(work: ScalingWork, setting: ScalingSetting, device: Device) -> float | None:
    """Return the seconds of a setting's step by the planner, ``None`` for a patched model.

    Args:
        work: what is trained.
        setting: how.
        device: a process of one thread (``fusedops bench device``); of several it is taken to
            compute so many times as fast, with the same memory.
    """
    if setting.parallel is None:
        return None
    parallel = ParallelConfig(**setting.parallel)
    rows = work.sequences // (parallel.dp * parallel.microbatches)
    layout = Layout(parallel, TrainingShape(micro_batch=rows, precision="float32"))
    peak = {name: setting.threads * rate for name, rate in device.peak.items()}
    shape = step_shape(work.config(work.tokens), layout)
    return step_time(shape, replace(device, peak=peak)).seconds


class _Team:
    """The processes of a setting, waiting for a word."""

    def __init__(self, setting: ScalingSetting, work: ScalingWork, store: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = setting.name
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(setting.processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(setting, work, rank, str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._links.append(mine)
            self._processes.append(process)

    def run(self, steps: int) -> tuple[float, float]:
        """Make steps; returns the seconds of one, of the slowest process, and the first's loss."""
        for link in self._links:
            link.send(steps)
        answers = [self._answer(link) for link in self._links]
        return max(answer[0] for answer in answers) / steps, answers[0][1]

    def _answer(self, link: Connection) -> tuple[float, float]:
        if not link.poll(_PATIENCE):
            raise RuntimeError(f"{self._name}: a process gave no answer in {_PATIENCE:.0f} s")
        try:
            failed, answer = link.recv()
        except EOFError:
            failed, answer = True, "it has ended"
        if failed:
            raise RuntimeError(f"{self._name}: a process failed: {answer}")
        return answer

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(
    setting: ScalingSetting, work: ScalingWork, rank: int, store: str, link: Connection
) -> None:
    """Train for as many steps as the other end says, again and again."""
    try:
        host.tune_host(threads=setting.threads)
        if setting.processes > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, setting.processes),
                rank=rank,
                world_size=setting.processes,
                timeout=timedelta(seconds=_PATIENCE),
            )
        step = _step_of(setting, work)
        while True:
            steps = link.recv()
            begin = time.perf_counter()
            losses = [step() for _ in range(steps)]
            link.send((False, (time.perf_counter() - begin, losses[0])))
    except EOFError:
        return
    except Exception as error:
        link.send((True, f"{type(error).__name__}: {error}"))


def _step_of(setting: ScalingSetting, work: ScalingWork) -> Callable[[], float]:
    """Return a function that makes a step and returns its loss."""
    config = work.config(work.tokens)
    if setting.parallel is not None:
        return training_step(config, ParallelConfig(**setting.parallel), work.sequences)
    return _patched_step(config, *text_of(config, work.sequences))


def _patched_step(
    config: TransformerConfig, tokens: torch.Tensor, labels: torch.Tensor
) -> Callable[[], float]:
    """Return a step of the model of transformers with this architecture, patched."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fusedops.integrations import patch
    from fusedops.models import to_config

    values = to_config(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(made)
    patch(model)
    model.train()
    optimizer = AdamW(model.parameters(), lr=1e-4, max_norm=1.0)

    def step() -> float:
        loss = model(input_ids=tokens, shift_labels=labels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
