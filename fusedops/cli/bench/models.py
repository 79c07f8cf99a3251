"""The command line of ``fusedops bench models``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.bench.model_zoo import ModelFamily, ModelSize
    from fusedops.bench.results import BenchRecord
    from fusedops.cli.bench.recorder import BenchRecorder, Job

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
        bool, typer.Option("--calibrate", help="Patch with calibrate=True, example=batch.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few samples, no memory: a first look.")
    ] = False,
    seconds: Annotated[float, options.seconds_per("model, mode and dtype")] = 8.0,
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
    svg_file: options.SvgFile = None,
    results: Annotated[
        Path | None, typer.Option(help="Write FOLDER/<device>/models-<family>-<dtype>.json.")
    ] = None,
) -> None:
    """Measure whole models, interleaved in one process: stock, torch.compile of it, and patched.

    Values are compared first, with float64: a wrong row of ours is named without a time, and the
    command exits with 1. Weights are random, nothing is downloaded: docs/bench_models.md.
    """
    with files.one_line_errors():
        files.check_environment()
        output.check_outputs(json_file, csv_file, svg_file, results=results)
        conditions = options.conditions(dtype, device, seconds, threads, allocator, quick=quick)
        plan = _plan(family, mode, model_size(hidden, layers, tokens, steps), quick)
        if compiled is None:
            compiled = conditions.device.type != "cpu"
        from fusedops.bench import chart, models_report
        from fusedops.bench.results import save_csv, save_json, save_model_results
        from fusedops.cli.bench.recorder import BenchRecorder, deliver

        recorder = BenchRecorder(
            conditions,
            conditions.timing(quick=(3, 7)),
            compiled=compiled,
            patch=f"fusedops.patch(model{', calibrate=True, example=batch' * calibrate})",
        )
        wrong: list[str] = []
        jobs = _jobs(recorder, plan, wrong, as_asked=bool(tokens), quick=quick, calibrate=calibrate)
        complete = recorder.run(jobs)
        recorder.notes += [f"WRONG: {error}" for error in wrong]
        record = recorder.record()
        written = (json_file, save_json), (csv_file, save_csv), (svg_file, chart.save)
        deliver(record, models_report.show, *written, (results, save_model_results))
    failed = _judge(record, fail_if_slower)
    if not complete:
        raise typer.Exit(130)  # as a shell says of an interrupted command
    if wrong or failed:
        raise typer.Exit(1)


def model_size(hidden: int, layers: int, tokens: str, steps: int) -> ModelSize:
    """Return the size that the options ask for."""
    options.check_transformers()
    from fusedops.bench.model_zoo import ModelSize

    if hidden % 16:
        raise files.UserError(f"--hidden must be a multiple of 16, got {hidden}")
    if not tokens:
        return ModelSize(hidden, layers, steps=steps)
    batch, _, seq_len = tokens.partition("x")
    if not (batch.isdigit() and seq_len.isdigit() and int(batch) and int(seq_len) > 1):
        raise files.UserError(f"--tokens must be sequences x tokens such as 4x256, got {tokens!r}")
    return ModelSize(hidden, layers, int(batch), int(seq_len), steps)


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
        raise files.UserError(
            f"{', '.join(chosen)}: no decoder among them, nothing to measure: add gpt2 to --family"
        )
    return plan


def _jobs(
    recorder: BenchRecorder,
    plan: list[tuple[ModelFamily, str, ModelSize]],
    wrong: list[str],
    *,
    as_asked: bool,
    quick: bool,
    calibrate: bool,
) -> list[Job]:
    """Return what measures each family, mode, size and dtype; what is wrong goes to ``wrong``."""
    from fusedops.bench.cases import BenchSettings
    from fusedops.bench.models import ModelCase, ModelSettings, affordable, patch, run_case

    def measure(case: ModelCase, given: BenchSettings) -> None:
        settings = ModelSettings(**vars(given), memory=not quick, patch=patch, calibrate=calibrate)
        result = run_case(case, settings)
        recorder.rows += result.rows
        recorder.notes += result.notes
        wrong.extend(result.wrong)

    device = recorder.device
    cases = [
        ModelCase(family, mode, size if as_asked else affordable(mode, size, dtype, device), dtype)
        for family, mode, size in plan
        for dtype in recorder.dtypes
    ]
    return [(case.title, partial(measure, case)) for case in cases]


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
