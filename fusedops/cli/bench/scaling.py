"""The command line of ``fusedops bench scaling``."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, show_table
from fusedops.terminal.progress import activity

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.bench.scaling import ScalingRow, ScalingWork
    from fusedops.planner import Device


def scaling(
    settings: Annotated[
        str, typer.Option(help="Comma-separated names of rows, without blanks; default: all.")
    ] = "",
    preset: Annotated[str, typer.Option(help="Preset with the architecture.")] = "gpt2",
    hidden: options.Hidden = 512,
    layers: options.Layers = 6,
    vocabulary: options.Vocabulary = 4096,
    tokens: options.Tokens = "8x256",
    seconds: Annotated[float, options.seconds_per("setting", most=3600)] = 30.0,
    json_file: options.JsonRows = None,
    device: Annotated[
        str,
        typer.Option(
            help="Also predict steps: TOML files of fusedops bench device, for one thread and two."
        ),
    ] = "",
) -> None:
    """Train one model on one process of two threads and on two processes of one thread.

    Tokens per second, and as a fraction of the first row's, interleaved: docs/parallel.md. Use an
    idle machine.
    """
    with files.one_line_errors():
        files.check_environment()
        output.check_outputs(json_file)
        sizes = options.sequences_and_tokens(tokens)
        from fusedops import models
        from fusedops.bench.scaling import SETTINGS, ScalingWork, measure
        from fusedops.bench.small_models import rows_record
        from fusedops.planner import load_device

        with files.user_errors(ValueError):
            models.preset(preset)
        own = [load_device(name.strip()) for name in device.split(",")] if device else []
        plain = {name.replace(" ", ""): name for name in SETTINGS}
        chosen = [plain[name] for name in _names(settings, plain)]
        work = ScalingWork(preset, hidden, layers, vocabulary, *sizes)
        with activity("starting") as report, files.user_errors(RuntimeError):
            rows = measure(work, chosen, seconds, report)
        record = rows_record(rows, work=asdict(work))
        output.deliver(record, json_file, partial(_show, rows, work, own))


def _names(text: str, known: dict[str, str]) -> list[str]:
    if not text:
        return list(known)
    # Names hold commas: "dp2,zero1" is one where there is one of that name.
    words, names = text.replace(" ", "").split(","), []
    while words:
        pair = ",".join(words[:2])
        name = pair if len(words) > 1 and pair in known else words[0]
        options.check_known(name, known, "setting")
        names.append(name)
        words = words[1 + name.count(",") :]
    return names


def _show(rows: list[ScalingRow], work: ScalingWork, devices: list[Device], out: Console) -> None:
    figures = number_columns("processes x threads", "tokens/s", "of the first", "loss")
    cells = (
        (
            row.setting.name,
            f"{row.setting.processes} x {row.setting.threads}",
            f"{row.tokens_per_second:.0f}",
            row.shown_ratio,
            f"{row.loss:.4f}",
        )
        for row in rows
    )
    show_table(out, ("setting", *figures), cells, title="a training step")
    if devices:
        _show_predicted(rows, work, devices, out)


def _show_predicted(
    rows: list[ScalingRow], work: ScalingWork, devices: list[Device], out: Console
) -> None:
    """Print the planner's seconds of each setting, their errors, and whether the order is right."""
    from fusedops.bench.scaling import predicted
    from fusedops.bench.tables import kendall_tau

    cells, pairs = [], []
    for row in rows:
        seconds = predicted(work, row.setting, devices)
        if seconds is None:
            continue
        measured = statistics.median(row.seconds)
        pairs.append((seconds, measured))
        times = f"{1e3 * measured:.1f}", f"{1e3 * seconds:.1f}"
        cells.append((row.setting.name, *times, f"{seconds / measured - 1:+.0%}"))
    columns = ("setting", *number_columns("measured ms", "predicted ms", "error"))
    names = " and ".join(device.name for device in devices)
    show_table(out, columns, cells, title=f"predicted steps, {names}")
    errors = [abs(seconds / measured - 1) for seconds, measured in pairs]
    out.print(
        f"mean error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}; Kendall's tau of "
        f"the order {kendall_tau(pairs):.2f}"
    )
