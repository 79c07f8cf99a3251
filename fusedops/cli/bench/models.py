"""The command line of ``fusedops bench models``.

torch is imported inside the functions, as in ``command.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.bench.model_zoo import ModelFamily, ModelSize
    from fusedops.bench.results import BenchRecord

# Of our rows to the fastest other: what two runs on a quiet machine differ by is below 3 %.
RATIO = 0.97
_JUDGE = "--fail-if-slower"


class Command(typer.core.TyperCommand):
    """The command, whose ``--fail-if-slower`` may stand without its number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the number in where it is left out, and let click do the rest."""
        filled: list[str] = []
        for word, following in zip(args, [*args[1:], ""], strict=True):
            filled.append(word)
            if word == _JUDGE and (not following or following.startswith("-")):
                filled.append(str(RATIO))
        return super().parse_args(ctx, filled)


def models(
    family: Annotated[
        str, typer.Option(help="Comma-separated: gpt2, bert, llama...; all; default: seven.")
    ] = "",
    mode: Annotated[
        str, typer.Option(help="Comma-separated: training, forward, decoding.")
    ] = "training,forward,decoding",
    dtype: options.Dtypes = "float32,bfloat16,float16",
    device: options.Device = "cpu",
    hidden: Annotated[int, typer.Option(min=16, help="Width; heads have 64.")] = 512,
    layers: options.Layers = 4,
    tokens: Annotated[
        str,
        typer.Option(
            help="Sequences x tokens; decoding reads them as its prompt. Default: 4x256, float16 "
            "on a CPU trains 1x64."
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Tokens that decoding generates.")] = 32,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="torch.compile of the stock model too; default: not on a CPU, where it takes "
            "minutes.",
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Patch with calibrate=True.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few samples, no memory: a first look.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            callback=options.finite, min=0.01, max=600, help="Time per model, mode and dtype."
        ),
    ] = 8.0,
    threads: options.Threads = 0,
    allocator: options.Allocator = "tuned",
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            _JUDGE,
            metavar="[RATIO]",
            min=0.0,
            help="Exit with 1 when a row of ours is below this ratio of the fastest other; "
            f"{RATIO} by default.",
        ),
    ] = None,
    json_file: options.JsonRecord = None,
    csv_file: options.CsvRows = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Draw the rows.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Write FOLDER/<device>/models-<family>-<dtype>.json."),
    ] = None,
) -> None:
    """Measure whole models, interleaved in one process: stock, torch.compile of it, and patched.

    Values are compared first, with float64: a wrong row of ours is named without a time, and the
    command exits with 1. Weights are random, nothing is downloaded: docs/bench_models.md.
    """
    with files.one_line_errors():
        files.check_environment()
        options.check_outputs((json_file, csv_file, svg_file), results)
        conditions = options.Conditions.of(dtype, device, seconds, threads, allocator, quick=quick)
        plan = _plan(family, mode, model_size(hidden, layers, tokens, steps), quick)
        if compiled is None:
            compiled = conditions.device.type != "cpu"
        record, wrong, complete = _measure(
            plan, conditions, as_asked=bool(tokens), compiled=compiled, calibrate=calibrate
        )
        _deliver(record, json_file, csv_file, svg_file, results)
    failed = _judge(record, fail_if_slower)
    if not complete:
        raise typer.Exit(130)  # as a shell says of an interrupted command
    if wrong or failed:
        raise typer.Exit(1)


def model_size(hidden: int, layers: int, tokens: str, steps: int) -> ModelSize:
    """Return the size that the options ask for."""
    _check_transformers()
    from fusedops.bench.model_zoo import ModelSize

    if hidden % 16:
        raise files.UserError(f"--hidden must be a multiple of 16, got {hidden}")
    if not tokens:
        return ModelSize(hidden, layers, steps=steps)
    batch, _, seq_len = tokens.partition("x")
    if not (batch.isdigit() and seq_len.isdigit() and int(batch) and int(seq_len) > 1):
        raise files.UserError(f"--tokens must be sequences x tokens such as 4x256, got {tokens!r}")
    return ModelSize(hidden, layers, int(batch), int(seq_len), steps)


def _check_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise files.UserError(
            "the models come from transformers, which is not installed (pip install transformers)"
        ) from None


def _plan(
    family: str, mode: str, size: ModelSize, quick: bool
) -> list[tuple[ModelFamily, str, ModelSize]]:
    """Return what to measure, in order."""
    from fusedops.bench.model_zoo import FAMILIES, HEADLINE
    from fusedops.bench.models import MODES, sizes

    chosen = list(HEADLINE)
    if family:
        names = options.words(family, (*FAMILIES, "all"), "family")
        chosen = list(FAMILIES) if "all" in names else list(dict.fromkeys(names))
    modes = options.words(mode, MODES, "mode")
    if quick:
        size = replace(size, steps=min(size.steps, 8))
    plan = [
        (FAMILIES[name], chosen_mode, of)
        for name in chosen
        for chosen_mode in modes
        for of in sizes(FAMILIES[name], chosen_mode, size)
    ]
    if not plan:
        raise files.UserError(f"{', '.join(chosen)}: no decoder among them, nothing to measure")
    return plan


def _measure(
    plan: list[tuple[ModelFamily, str, ModelSize]],
    conditions: options.Conditions,
    *,
    as_asked: bool,
    compiled: bool,
    calibrate: bool,
) -> tuple[BenchRecord, list[str], bool]:
    """Return what was measured, what is wrong, and whether that is all."""
    from fusedops._core.timer import TimingPlan, clock_for
    from fusedops.bench import machine
    from fusedops.bench.limits import measure_limits
    from fusedops.bench.models import ModelSettings, affordable, label, patch, run_case
    from fusedops.bench.results import BenchRow, record_of
    from fusedops.terminal.progress import steps

    dtypes, device, seconds = conditions.set_up(), conditions.device, conditions.seconds
    here, clock = machine.describe(device), clock_for(device)
    timing = TimingPlan(3, 7, seconds / 4) if conditions.quick else TimingPlan(seconds=seconds)
    rows: list[BenchRow] = []
    notes: list[str] = []
    wrong: list[str] = []
    complete = True
    with steps(1 + len(plan) * len(dtypes)) as progress, options.sigterm_interrupts():
        progress.describe("limits of this machine")
        limits = measure_limits(device, dtypes, clock)
        progress.advance()
        title = ""
        try:
            for family, mode, planned in plan:
                for dtype in dtypes:
                    size = planned if as_asked else affordable(mode, planned, dtype, device)
                    short = str(dtype).removeprefix("torch.")
                    title = f"{family.name} {mode} {label(mode, size)} {short}"

                    def report(what: str, title: str = title) -> None:
                        progress.describe(f"{title}: {what}")

                    settings = ModelSettings(
                        device=device,
                        plan=timing,
                        compiled=compiled,
                        memory=not conditions.quick,
                        allocator=conditions.allocator,
                        cache_bytes=here["cache_bytes"],
                        report=report,
                        patch=partial(patch, calibrate=calibrate),
                    )
                    result = run_case(family, mode, dtype, size, settings, limits, clock)
                    rows += result.rows
                    notes += result.notes
                    wrong += result.wrong
                    progress.advance()
        except KeyboardInterrupt:
            if not rows:
                raise
            complete = False
            notes.append(f"interrupted at {title}: what was measured before is here")
    settled = {
        "allocator": conditions.allocator,
        "dtypes": conditions.dtypes,
        "compile": compiled,
        "patch": f"fusedops.patch(model{', calibrate=True' * calibrate})",
    }
    notes += [f"WRONG: {error}" for error in wrong]
    record = record_of(here, timing, limits, rows, notes, **settled)
    return record, wrong, complete


def _deliver(
    record: BenchRecord,
    json_file: Path | None,
    csv_file: Path | None,
    svg_file: Path | None,
    results: Path | None,
) -> None:
    """Show the record, then write what was asked for: a full disk must not cost the table."""
    from fusedops.bench import models_report
    from fusedops.bench.results import save_json, save_model_results, to_csv
    from fusedops.terminal.console import console

    out = console()
    models_report.show(record, out)
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (json_file, lambda path: save_json(path, record)),
        (csv_file, lambda path: files.write_text(path, to_csv(record, record.rows))),
        (svg_file, lambda path: files.write_text(path, models_report.chart(record))),
        (results, lambda path: save_model_results(path, record)),
    ]
    options.write_all(writers, out)


def _judge(record: BenchRecord, ratio: float | None) -> bool:
    """Print which rows are slower than asked for; return whether one is."""
    if ratio is None:
        return False
    from fusedops.bench import models_report
    from fusedops.bench.models import slower

    below, doubtful = slower(record.rows, ratio)
    judged = sum(row.lead is not None for row in record.rows) - len(doubtful)
    for line in models_report.verdict(below, doubtful, ratio, judged):
        print(line)
    return bool(below)
