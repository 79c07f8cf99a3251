"""The command line of ``fusedops bench models``."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fusedops.cli import output
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
        str, Option(help="Comma-separated: gpt2, bert, llama...; all; default: seven.")
    ] = "",
    mode: Annotated[str, Option(help="Comma-separated modes.")] = "training,forward,decoding",
    dtype: options.Dtypes = "float32,bfloat16,float16",
    device: options.Device = "cpu",
    hidden: options.SmallHidden = 512,
    layers: options.Layers = 4,
    tokens: Annotated[
        str,
        Option(
            help="Sequences x tokens; decoding reads them as its prompt. Default: 4x256, float16 "
            "on a CPU trains 1x64."
        ),
    ] = "",
    steps: Annotated[int, Option(min=1, help="Tokens that decoding generates.")] = 32,
    compiled: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="torch.compile too; default: not on a CPU."),
    ] = None,
    calibrate: Annotated[
        bool, Option("--calibrate", help="Patch with calibrate=True, example=batch.")
    ] = False,
    quick: Annotated[bool, Option("--quick", help="Few samples, no memory.")] = False,
    seconds: Annotated[float, options.seconds_per("model, mode and dtype")] = 8.0,
    threads: options.Threads = 0,
    allocator: options.Allocator = "tuned",
    fail_if_slower: Annotated[
        float | None,
        Option(
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
        Path | None, Option(help="Write FOLDER/<device>/models-<family>-<dtype>.json.")
    ] = None,
) -> None:
    """Measure whole models, interleaved in one process: stock, torch.compile of it, and patched.

    Values are compared first, with float64: a wrong row of ours is named without a time, and the
    command exits with 1. Weights are random, nothing is downloaded: docs/bench_models.md.
    """
    with output.checked(json_file, csv_file, svg_file, results=results):
        conditions = options.conditions(dtype, device, seconds, threads, allocator, quick=quick)
        size = options.model_size(hidden, layers, tokens, min(steps, 8) if quick else steps)
        plan = _plan(family, mode, size)
        if compiled is None:
            compiled = conditions.device.type != "cpu"
        from fusedops.bench import models as bench
        from fusedops.bench.runner import BenchRun, BenchSettings

        patched = f"fusedops.patch(model{', calibrate=True, example=batch' * calibrate})"
        run = BenchRun(conditions, conditions.timing(3, 7), compiled=compiled, patch=patched)
        wrong: list[str] = []

        def measure(case: bench.ModelCase, settings: BenchSettings) -> None:
            result = bench.run_case(case, settings)
            run.rows += result.rows
            run.notes += result.notes
            wrong.extend(result.wrong)

        jobs = []
        for (chosen, of, asked), at in itertools.product(plan, run.dtypes):
            fits = asked if tokens else bench.affordable(of, asked, at, run.device)
            case = bench.ModelCase(chosen, of, fits, at)
            jobs.append((case.title, partial(measure, case)))
        complete = run.run(jobs, memory=not quick, calibrate=calibrate)
        run.notes += [f"WRONG: {error}" for error in wrong]
        record = run.record()
        outputs = json_file, csv_file, svg_file, results
        output.deliver_record(record, *outputs, name="models-{}-{}.json", complete=complete)
    failed = _judge(record, fail_if_slower)
    if wrong or failed:
        raise typer.Exit(1)


def _plan(family: str, mode: str, size: ModelSize) -> list[tuple[ModelFamily, str, ModelSize]]:
    """Return what to measure, in order."""
    from fusedops.bench.model_zoo import FAMILIES, HEADLINE
    from fusedops.bench.models import MODES, sizes

    chosen = list(HEADLINE)
    if family:
        names = options.words(family, (*FAMILIES, "all"), "family")
        chosen = list(FAMILIES) if "all" in names else list(dict.fromkeys(names))
    modes = options.words(mode, MODES, "mode")
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


def _judge(record: BenchRecord, ratio: float | None) -> bool:
    """Print which rows are slower than asked for; return whether one is."""
    if ratio is None:
        return False
    from fusedops.bench import report
    from fusedops.bench.models import slower

    below, doubtful = slower(record.rows, ratio)
    judged = sum(row.lead is not None for row in record.rows) - len(doubtful)
    for line in report.verdict(below, doubtful, ratio, judged):
        print(line)
    return bool(below)
