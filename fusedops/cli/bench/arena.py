"""The command line of ``fusedops bench arena``."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.bench.arena_step import ArenaStepRow
    from fusedops.memory.arena import Placement

_COLUMNS = ("lower", "upper", "size")


@dataclass(frozen=True)
class _Row:
    """A file that was placed."""

    name: str
    buffers: dict[str, list[int]]  # by column
    placement: Placement
    seconds: float


def arena(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILES...", help="CSV files: id,lower,upper,size."),
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(min=0, help="Bytes of a block that is small enough.")
    ] = None,
    alignment: Annotated[int, typer.Option(min=1, help="Of every offset.")] = 1,
    seconds: Annotated[float, options.seconds_per("file, or process of --step", most=3600)] = 1.0,
    step: Annotated[
        bool, typer.Option("--step", help="Time a training step with and without an arena.")
    ] = False,
    family: Annotated[str, typer.Option(help="Of the model of --step.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="Of its weights.")] = "bfloat16",
    hidden: options.Hidden = 512,
    layers: options.Layers = 4,
    tokens: Annotated[str, typer.Option(help="Sequences x tokens.")] = "4x256",
    threads: options.Threads = 0,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes of --step.")] = 5,
    patched: Annotated[bool, typer.Option("--patched", help="Fuse the model of --step.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write rows and offsets to a file.")
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", help="Draw the buffers of the first file.")
    ] = None,
) -> None:
    """Place buffers of known lifetimes in one block, and compare its size with the lower bound.

    A file has a line for each buffer, which lives from lower up to, but not including, upper.
    With --step no file is read: a training step is timed with and without an arena, interleaved,
    with the system's allocator, in fresh processes. docs/memory.md.
    """
    with files.one_line_errors():
        options.check_outputs((json_file, svg_file), None)
        if step == bool(sources):
            raise files.UserError("fusedops bench arena needs either FILES or --step")
        if step:
            _time_steps(
                family,
                dtype,
                (hidden, layers, tokens),
                seconds,
                threads,
                processes,
                patched,
                json_file,
                svg_file,
            )
            return
        from fusedops.terminal.progress import steps

        rows = []
        with steps(len(sources or ())) as progress, options.sigterm_interrupts():
            for source in sources or ():
                progress.describe(source.name)
                rows.append(_placed(source, capacity, alignment, seconds))
                progress.advance()
        _show(rows)
        if json_file is not None:
            files.write_json(json_file, {"rows": [_record(row) for row in rows]})
        if svg_file is not None:
            first = rows[0]
            times = zip(first.buffers["lower"], first.buffers["upper"], strict=True)
            spans = zip(first.placement.offsets, first.buffers["size"], strict=True)
            boxes = [
                (begin, end, offset, offset + size)
                for (begin, end), (offset, size) in zip(times, spans, strict=True)
            ]
            text = f"{first.name}: {first.placement.height} bytes, bound {first.placement.bound}"
            _draw(svg_file, text, boxes)


def _draw(path: Path, title: str, boxes: Sequence[tuple[int, int, int, int]]) -> None:
    from fusedops.bench.svg import rectangles

    files.write_text(path, rectangles(title, boxes))


def _time_steps(
    family: str,
    dtype: str,
    sizes: tuple[int, int, str],
    seconds: float,
    threads: int,
    processes: int,
    patched: bool,
    json_file: Path | None,
    svg_file: Path | None,
) -> None:
    """Time a training step with and without an arena."""
    from fusedops.bench import arena_step, machine
    from fusedops.bench.model_zoo import FAMILIES
    from fusedops.bench.results import now
    from fusedops.cli.bench import models
    from fusedops.terminal.console import console

    conditions = options.conditions(dtype, "cpu", seconds, threads, "system")
    options.words(family, FAMILIES, "family")
    dtypes = conditions.set_up()
    if len(dtypes) != 1:
        raise files.UserError(f"--step needs one dtype, got {dtype}")
    settings = arena_step.ArenaStepSettings(
        family,
        models.model_size(*sizes, 1),
        dtypes[0],
        seconds,
        threads,
        processes,
        patched,
    )
    with options.sigterm_interrupts():
        rows = arena_step.run(settings)
    _show_steps(rows, arena_step.median_speedup(rows))
    console().print(str(rows[0].report), style="dim", highlight=False)
    if json_file is not None:
        record = {
            "machine": machine.describe(conditions.device),
            "versions": machine.versions(),
            "git": machine.git_commit(),
            "settings": {
                "family": family,
                "dtype": dtype,
                "size": settings.size.label,
                "patched": patched,
            },
            "rows": [asdict(row) for row in rows],
            "speedup": arena_step.median_speedup(rows),
            "created": now(),
        }
        files.write_json(json_file, record)
    if svg_file is not None:
        report = rows[0].report
        title = f"{settings.family} {settings.size.label}: {report.block_bytes} bytes"
        _draw(svg_file, f"{title}, bound {report.bound_bytes}", report.boxes)
    if not all(row.same_bits for row in rows):
        raise typer.Exit(1)


def _show_steps(rows: Sequence[ArenaStepRow], speedup: float) -> None:
    from rich.table import Table

    from fusedops.bench.table import DISTURBED
    from fusedops.terminal.console import console, number_columns, print_table

    names = ("plain ms", "arena ms", "plain / arena", "quartiles", "block / bound", "bits")
    table = Table("process", *number_columns(*names), header_style="bold")
    for number, row in enumerate(rows, 1):
        figures = [f"{row.plain_ms:.1f}", f"{row.arena_ms:.1f}", f"{row.speedup:.2f}"]
        table.add_row(
            str(number),
            *(figures if row.trusted else (DISTURBED, "-", "-")),
            f"{row.speedup_q1:.2f}-{row.speedup_q3:.2f}" if row.trusted else "-",
            f"{row.report.block_bytes / max(row.report.bound_bytes, 1):.4f}",
            "same" if row.same_bits else "OTHER",
        )
    print_table(console(), table)
    console().print(f"median of {len(rows)} processes: {speedup:.2f}", highlight=False)


def _placed(source: Path, capacity: int | None, alignment: int, seconds: float) -> _Row:
    from fusedops.memory.arena import place

    buffers = _read(source)
    began = time.perf_counter()
    try:
        placement = place(
            *(buffers[name] for name in _COLUMNS),
            capacity=capacity,
            alignment=alignment,
            seconds=seconds,
        )
    except ValueError as error:
        raise files.UserError(f"{source}: {error}") from None
    return _Row(source.name, buffers, placement, time.perf_counter() - began)


def _read(source: Path) -> dict[str, list[int]]:
    """Return the columns of a file."""
    try:
        with source.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise files.UserError(f"{source} cannot be read: {error}; check the path") from None
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    for number, line in enumerate(lines, 2):
        for name in _COLUMNS:
            try:
                columns[name].append(int(line[name]))
            except (KeyError, TypeError, ValueError):
                text = line.get(name)
                raise files.UserError(
                    f"{source}, line {number}: {name} must be an integer, got {text!r}; the first "
                    "line must be id,lower,upper,size"
                ) from None
    if not lines:
        raise files.UserError(
            f"{source} has no buffers: it must have a line id,lower,upper,size for each"
        )
    return columns


def _show(rows: list[_Row]) -> None:
    from rich.table import Table

    from fusedops.terminal.console import console, number_columns, print_table

    figures = number_columns("buffers", "bound", "block", "block / bound", "seconds")
    table = Table("file", *figures, "", header_style="bold")
    for row in rows:
        placement = row.placement
        words = "the smallest possible" if placement.exact else "fits" if placement.capacity else ""
        table.add_row(
            row.name,
            str(len(placement.offsets)),
            str(placement.bound),
            str(placement.height),
            f"{1 + placement.gap:.4f}",
            f"{row.seconds:.2f}",
            words if placement.fits else "larger than the capacity",
        )
    print_table(console(), table)


def _record(row: _Row) -> dict[str, object]:
    placement = row.placement
    return {
        "file": row.name,
        "buffers": len(placement.offsets),
        "bound": placement.bound,
        "block": placement.height,
        "fits": placement.fits,
        "exact": placement.exact,
        "seconds": row.seconds,
        "offsets": list(placement.offsets),
    }
