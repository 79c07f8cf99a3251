"""The command line of ``fusedops bench arena``."""

from __future__ import annotations

import csv
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
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
        list[Path], typer.Argument(metavar="FILES...", help="CSV files: id,lower,upper,size.")
    ],
    capacity: Annotated[
        int | None, typer.Option(min=0, help="Bytes of a block that is small enough.")
    ] = None,
    alignment: Annotated[int, typer.Option(min=1, help="Of every offset.")] = 1,
    seconds: Annotated[float, options.seconds_per("file", most=3600)] = 1.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write rows and offsets to a file.")
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", help="Draw the buffers of the first file.")
    ] = None,
) -> None:
    """Place buffers of known lifetimes in one block, and compare its size with the lower bound.

    A file has a line for each buffer, which lives from lower up to, but not including, upper.
    docs/memory.md.
    """
    with files.one_line_errors():
        options.check_outputs((json_file, svg_file), None)
        from fusedops.terminal.progress import steps

        rows = []
        with steps(len(sources)) as progress, options.sigterm_interrupts():
            for source in sources:
                progress.describe(source.name)
                rows.append(_placed(source, capacity, alignment, seconds))
                progress.advance()
        _show(rows)
        if json_file is not None:
            files.write_json(json_file, {"rows": [_record(row) for row in rows]})
        if svg_file is not None:
            from fusedops.bench.svg import rectangles

            first = rows[0]
            times = zip(first.buffers["lower"], first.buffers["upper"], strict=True)
            spans = zip(first.placement.offsets, first.buffers["size"], strict=True)
            boxes = [
                (begin, end, offset, offset + size)
                for (begin, end), (offset, size) in zip(times, spans, strict=True)
            ]
            text = f"{first.name}: {first.placement.height} bytes, bound {first.placement.bound}"
            files.write_text(svg_file, rectangles(text, boxes))


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
        raise files.UserError(f"{source} cannot be read: {error}") from None
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
        raise files.UserError(f"{source} has no buffers")
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
