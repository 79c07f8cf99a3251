"""The command line of ``fusedops bench memory``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli.bench import models, options
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.bench.memory import MemoryRow
    from fusedops.memory.measurement.report import MemoryReport


def memory(
    family: Annotated[str, typer.Option(help="Comma-separated: gpt2, llama, bert...")] = "gpt2",
    dtype: options.Dtypes = "float32",
    device: options.Device = "cpu",
    hidden: Annotated[int, typer.Option(min=16, help="Width; heads have 64.")] = 512,
    layers: Annotated[int, typer.Option(min=2, help="Number of layers.")] = 4,
    tokens: Annotated[str, typer.Option(help="Sequences x tokens.")] = "4x256",
    seconds: Annotated[float, options.seconds_per("model and dtype")] = 20.0,
    threads: options.Threads = 0,
    allocator: options.Allocator = "tuned",
    json_file: options.JsonRows = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", help="Draw plain and recomputed steps of the first row.")
    ] = None,
) -> None:
    """Measure a step of training under memory policies: bytes, and time against the plain step.

    All variants are copies of one patched model, and are interleaved. A policy that changes a bit
    of the loss or of a gradient is named, and the command exits with 1: docs/memory.md.
    """
    with files.one_line_errors():
        files.check_environment()
        options.check_outputs((json_file, svg_file), None)
        conditions = options.conditions(dtype, device, seconds, threads, allocator)
        size = models.model_size(hidden, layers, tokens, 1)
        from fusedops.bench.model_zoo import FAMILIES

        families = options.words(family, FAMILIES, "family")
        chosen = [FAMILIES[name] for name in families]
        rows, reports, record = _measure(chosen, size, conditions)
        _show(rows, record)
        from fusedops.terminal.console import console

        written = (json_file, files.write_json), (svg_file, partial(_save_picture, reports))
        options.write_all(record, written, console())
    if not all(row.same_bits for row in rows):
        raise typer.Exit(1)


def _measure(
    families: list[Any], size: Any, conditions: options.Conditions
) -> tuple[list[MemoryRow], dict[str, MemoryReport], dict[str, Any]]:
    from fusedops.bench import machine
    from fusedops.bench.memory import run_case
    from fusedops.bench.results import now
    from fusedops.runtime.timer import TimingPlan, clock_for
    from fusedops.terminal.progress import steps

    dtypes, device, seconds = conditions.set_up(), conditions.device, conditions.seconds
    rows: list[MemoryRow] = []
    reports: dict[str, MemoryReport] = {}
    with steps(len(families) * len(dtypes)) as progress, options.sigterm_interrupts():
        for family in families:
            for dtype in dtypes:
                title = f"{family.name} {str(dtype).removeprefix('torch.')}"
                report = options.reporter(progress, title)
                plan = TimingPlan(seconds=seconds)
                measured, drawn = run_case(
                    family, size, dtype, device, clock_for(device), plan, report
                )
                rows += measured
                reports = reports or drawn
                progress.advance()
    record = {
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "git": machine.git_commit(),
        "settings": {"allocator": conditions.allocator, "seconds": seconds, "device": device.type},
        "rows": [asdict(row) for row in rows],
        "created": now(),
    }
    return rows, reports, record


def _show(rows: list[MemoryRow], record: dict[str, Any]) -> None:
    from rich.table import Table

    from fusedops.bench.table import DISTURBED
    from fusedops.terminal.console import console, number_columns, print_table

    out = console()
    table = Table(
        *("model", "size", "dtype", "policy"),
        *number_columns("activations MiB", "peak MiB", "ms", "x plain", "quartiles", "bits"),
        title=f"a step of training under memory policies ({record['machine']['name']}, "
        f"{record['machine']['threads']} threads, allocator {record['settings']['allocator']})",
        title_justify="left",
    )
    for row in rows:
        table.add_row(
            row.family,
            row.case,
            row.dtype,
            row.policy,
            f"{row.activations / 2**20:.1f}",
            f"{row.peak / 2**20:.1f}",
            *(_times(row) if row.trusted else (DISTURBED, "-", "-")),
            "same" if row.same_bits else "OTHER",
        )
    print_table(out, table)
    out.print(
        "activations: what the forward leaves for the backward; peak: of the step above weights; "
        "x plain: time by the plain step's, median of the rounds",
        style="dim",
    )
    if record["settings"]["device"] == "cpu":
        out.print(
            "offload on a CPU moves bytes out of torch's allocator, to the same memory", style="dim"
        )


def _times(row: MemoryRow) -> list[str]:
    quartiles = f"{row.overhead_q1:.2f}-{row.overhead_q3:.2f}"
    return [f"{row.median_ms:.1f}", f"{row.overhead:.2f}", quartiles]


def _save_picture(reports: dict[str, MemoryReport], path: Path, _: object) -> None:
    from fusedops.terminal import memory_plot

    first = next(iter(reports.values()))
    lines = {name: reports[name].timeline for name in ("plain", "recompute")}
    title = f"{first.model}: bytes of one step, without and with recomputation"
    files.write_text(path, memory_plot.timeline(title, lines))
