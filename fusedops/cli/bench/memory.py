"""The command line of ``fusedops bench memory``."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.console import DISTURBED, number_columns, show_table
from fusedops.terminal.progress import sigterm_interrupts, steps

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.bench.memory import MemoryRow
    from fusedops.memory.measurement.report import MemoryReport


def memory(
    family: Annotated[str, typer.Option(help="Comma-separated: gpt2, llama, bert...")] = "gpt2",
    dtype: options.Dtypes = "float32",
    device: options.Device = "cpu",
    hidden: options.SmallHidden = 512,
    layers: Annotated[int, typer.Option(min=2, help="Number of layers.")] = 4,
    tokens: options.Tokens = "4x256",
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
        output.check_outputs(json_file, svg_file)
        conditions = options.conditions(dtype, device, seconds, threads, allocator)
        size = options.model_size(hidden, layers, tokens)
        from fusedops.bench import machine
        from fusedops.bench.memory import run_case
        from fusedops.bench.model_zoo import FAMILIES
        from fusedops.bench.results import dtype_name
        from fusedops.runtime.timer import TimingPlan, clock_for

        chosen = [FAMILIES[name] for name in options.words(family, FAMILIES, "family")]
        cases = list(itertools.product(chosen, conditions.set_up()))
        where = conditions.device
        clock, plan = clock_for(where), TimingPlan(seconds=seconds)
        rows: list[MemoryRow] = []
        reports: dict[str, MemoryReport] = {}
        with steps(len(cases)) as progress, sigterm_interrupts():
            for of, weights in cases:
                report = progress.reporter(f"{of.name} {dtype_name(weights)}")
                measured, drawn = run_case(of, size, weights, where, clock, plan, report)
                rows += measured
                reports = reports or drawn
                progress.advance()
        settings = {"allocator": allocator, "seconds": seconds, "device": where.type}
        record = {"settings": settings, "rows": [asdict(row) for row in rows]}
        record = machine.provenance(where) | record
        picture = output.text_file(svg_file, partial(_picture, reports))
        output.deliver(record, json_file, partial(_show, rows, record), picture)
    if not all(row.same_bits for row in rows):
        raise typer.Exit(1)


def _show(rows: list[MemoryRow], record: dict[str, Any], out: Console) -> None:
    here, settings = record["machine"], record["settings"]
    figures = ("activations MiB", "peak MiB", "ms", "x plain", "quartiles", "bits")
    show_table(
        out,
        ("model", "size", "dtype", "policy", *number_columns(*figures)),
        map(_cells, rows),
        title=f"a step of training under memory policies ({here['name']}, "
        f"{here['threads']} threads, allocator {settings['allocator']})",
        title_justify="left",
    )
    notes = [
        "activations: what the forward leaves for the backward; peak: of the step above weights; "
        "x plain: time by the plain step's, median of the rounds"
    ]
    if settings["device"] == "cpu":
        notes.append("offload on a CPU moves bytes out of torch's allocator, to the same memory")
    for note in notes:
        out.print(note, style="dim")


def _cells(row: MemoryRow) -> list[str]:
    times = [DISTURBED, "-", "-"]
    if row.trusted:
        quartiles = f"{row.overhead_q1:.2f}-{row.overhead_q3:.2f}"
        times = [f"{row.median_ms:.1f}", f"{row.overhead:.2f}", quartiles]
    sizes = [f"{size / 2**20:.1f}" for size in (row.activations, row.peak)]
    bits = "same" if row.same_bits else "OTHER"
    return [row.family, row.case, row.dtype, row.policy, *sizes, *times, bits]


def _picture(reports: dict[str, MemoryReport]) -> str:
    from fusedops.terminal import memory_plot

    first = next(iter(reports.values()))
    lines = {name: reports[name].timeline for name in ("plain", "recompute")}
    title = f"{first.model}: bytes of one step, without and with recomputation"
    return memory_plot.timeline(title, lines)
