"""``fusedops train``: trains the model of a configuration file, on one process or several.

The work is ``fusedops.train``; here are the command line, the progress bar and the exit codes: 0
when the run is done, ``--stop-code`` (0) when it was stopped and saved, 1 when it failed on the
way, 2 for what the user can put right.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fusedops._core import env
from fusedops.cli.errors import print_message, report_errors_once
from fusedops.terminal import files
from fusedops.terminal.progress import activity, make_bar

if TYPE_CHECKING:
    from fusedops.train import ProgressLines, TrainResult
    from fusedops.train.builder import Run


def train(
    config: Annotated[str, Argument(help="A TOML file (--example writes one).")] = "",
    processes: Annotated[int, Option(min=1, help="Processes on this machine.")] = 1,
    overrides: Annotated[
        list[str] | None, Option("--set", help="Override a key, as optimizer.lr=3e-4.")
    ] = None,
    plan: Annotated[str, Option(help="JSON of fusedops plan: use its first layout.")] = "",
    restarts: Annotated[int, Option(min=0, help="Most restarts after a process failed.")] = 0,
    stop_code: Annotated[int, Option(min=0, max=125, help="Exit code after a signal.")] = 0,
    example: Annotated[bool, Option("--example", help="Write a commented train.toml.")] = False,
) -> None:
    """Train a transformer; a second start resumes from the last checkpoint.

    A configuration has the keys that docs/training.md explains.
    """
    again = "; the same command resumes from the last checkpoint"
    with report_errors_once(lost=again):
        if example:
            write_example(Path(config or "train.toml"))
            return
        if not config:
            raise files.UserError("which configuration? fusedops train --example writes one")
        if stop_code in (1, 2):
            raise files.UserError(f"--stop-code must not be {stop_code}, which reports an error")
        if not Path(config).exists():
            raise files.UserError(
                f"{config} does not exist: correct the name, or let fusedops train --example "
                f"{config} write it"
            )
        files.check_environment()
        given = [*(_assignments(Path(plan)) if plan else ()), *(overrides or ())]
        one_of_several = env.has_nodes() and env.launched() is None
        if processes > 1 or restarts or one_of_several:
            _launch(config, given, processes, restarts, stop_code)
        _train(config, given, stop_code)


def write_example(path: Path) -> None:
    """Write a commented configuration with every key.

    It runs on the corpus of the demo, the source of the installed sympy, which torch brings.
    """
    if path.exists():
        raise files.UserError(f"{path} exists already; give another name: --example other.toml")
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise files.UserError("the example's corpus is the source of sympy: pip install sympy")
    corpus = Path(next(iter(spec.submodule_search_locations))) / "**" / "*.py"
    text = Path(__file__).parents[1].joinpath("train", "example.toml").read_text(encoding="utf-8")
    files.write_text(path, text.replace("NAME", str(path)).replace("CORPUS", str(corpus)))
    print(f"wrote {path}; start it with: fusedops train {path}", file=sys.stderr)


def _assignments(path: Path) -> list[str]:
    """Return the first layout of a plan that fits as overrides of a configuration."""
    from dataclasses import fields

    from fusedops.launch.config_table import unknown
    from fusedops.models import ParallelConfig
    from fusedops.planner import Layout

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
    assignments = [
        f"parallel.{name}={json.dumps(value)}"  # of these types TOML writes what JSON does
        for name, value in sorted(values.items())
        if value is not None
    ]
    sequences = layout["dp"] * layout["micro_batch"] * layout["microbatches"]
    return [f"batch={sequences}", *assignments]


def _launch(
    config: str, overrides: list[str], processes: int, restarts: int, stop_code: int
) -> None:
    """Start the processes and leave with their exit code."""
    from fusedops.launch.job import join_job
    from fusedops.train import launch, load_config

    join_job()
    place = env.launched()
    if place is not None:
        raise files.UserError(
            f"--processes and --restarts start processes, and the launcher has started {place[1]} "
            "already: leave them out, or start one process on each machine"
        )
    load_config(config, overrides)  # reports a mistake before any process starts
    cores = os.cpu_count() or processes
    if processes > cores:
        print(
            f"fusedops: {processes} processes share the {cores} cores of this machine, which makes "
            f"steps slow; with --processes {cores} or fewer each has a core of its own",
            file=sys.stderr,
        )
    given = [part for assignment in overrides for part in ("--set", assignment)]
    given += ["--stop-code", str(stop_code)]
    arguments = ["train", config, *given]
    raise SystemExit(launch(processes, arguments, restarts=restarts, stop_code=stop_code))


def _train(config: str, overrides: list[str], stop_code: int) -> None:
    from fusedops import train
    from fusedops.cli import train_memory

    logging.basicConfig(format="fusedops: %(message)s", level=logging.WARNING)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash in C tells where
    progress = _ProgressPrinter()
    try:
        with progress:
            result = train.train(config, overrides, callback=progress)
    except (MemoryError, RuntimeError) as error:
        message = train_memory.out_of_memory(error, progress.run)
        if message is None:
            raise
        print_message(f"fusedops: error: {message}")
        raise SystemExit(1) from None
    if progress.run is not None:
        print_message(_ending(result))
    if not result.finished and stop_code:
        raise SystemExit(stop_code)


def _ending(result: TrainResult) -> str:
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
        self._lines: ProgressLines
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
        from fusedops.cli import train_memory
        from fusedops.train import ProgressLines

        self._preparation.close()
        self.run, self._lines = run, ProgressLines()
        warning = train_memory.check_memory(run)
        self._lines.begin(run)
        if warning:
            print_message(warning)
        if sys.stderr.isatty():
            from rich.progress import TimeRemainingColumn

            self._bar = make_bar(TimeRemainingColumn())
            self._bar.add_task("", total=run.config.steps, completed=run.step)
            self._bar.start()

    def show(self, record: Mapping[str, Any]) -> None:
        """Print the figures of a step."""
        from fusedops.train.progress import figures

        if self._bar is None:
            self._lines.show(record)
            return
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=record["step"], description=figures(record))
