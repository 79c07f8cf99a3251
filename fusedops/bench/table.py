"""A record as tables in the terminal: what we gain over eager first, then what it is made of."""

from __future__ import annotations

import itertools
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedops.bench.results import BenchRecord, BenchRow
from fusedops.terminal.console import DISTURBED, number_columns, print_table

_WIDE = 132


def show(record: BenchRecord, out: Console) -> None:
    """Print machine, limits and one table per op and dtype."""
    show_limits(record, out)
    narrow = out.width < _WIDE
    for (op, dtype), part in record.parts().items():
        print_table(out, _table(op, dtype, part, narrow))
    if narrow:
        out.print(f"{_WIDE} columns also show spread, host overhead, mean error", style="dim")
    if any(row.in_cache for row in record.rows):
        out.print(
            "* part of it stays in the last cache: may exceed the limit of memory", style="dim"
        )
    for note in (*record.notes, *warnings(record)):
        out.print(Text(f"note: {note}", style="yellow"))


def show_limits(record: BenchRecord, out: Console) -> None:
    """Print where it was measured and what that machine can do."""
    machine, limits = record.machine, record.limits
    threads = f", {machine['threads']} threads" if machine["threads"] else ""
    out.print(
        f"[bold]{machine['slug']}[/]: {machine['name']}{threads}, "
        f"torch {record.versions['torch']}, allocator {record.settings['allocator']}"
    )
    copy = limits["copy"]
    parts = [f"copy {copy['rate'] / 1e9:.1f} GB/s ({copy['way']})"]
    parts += [
        f"{dtype} matmul {limit['rate'] / 1e12:.2f} TFLOP/s ({limit['way']}{_others(limit)})"
        for dtype, limit in limits["matmul"].items()
    ]
    out.print("measured limits: " + ", ".join(parts))


def _others(limit: dict[str, Any]) -> str:
    return "".join(f"; {way} {rate / 1e12:.2f}" for way, rate in limit["others"].items())


def _table(op: str, dtype: str, part: BenchRecord, narrow: bool) -> Table:
    rows, allocator = part.rows, part.settings["allocator"]
    has_products = any(row.tflop_per_s for row in rows)
    rate = "TFLOP/s" if has_products else "GB/s"
    figures = (
        *("x eager", "time us", "+-", rate, "of limit"),
        *("host us", "peak MiB", "ulp max", "mean"),
    )
    shown = [not narrow or name not in ("+-", "host us", "mean") for name in figures]
    table = Table(
        *("size", "direction", "who"),
        *number_columns(*itertools.compress(figures, shown)),
        title=f"{op}  {dtype}  (allocator {allocator} for all rows)",
        title_justify="left",
        title_style="bold",
    )
    before = ("", "")
    for index, row in enumerate(rows):
        first = (row.case, row.direction) != before
        last = index + 1 == len(rows) or rows[index + 1].case != row.case
        before = (row.case, row.direction)
        table.add_row(
            row.case if first else "",
            row.direction if first else "",
            _who(row),
            *itertools.compress(_figures(row, has_products), shown),
            style="bold" if row.variant == "fusedops" else "",
            end_section=last,
        )
    return table


def _figures(row: BenchRow, has_products: bool) -> list[str | Text]:
    return [
        *(_times(row, has_products) if row.trusted else (DISTURBED, "-", "-", "-", "-")),
        _number(row.host_us),
        _number(None if row.peak_bytes is None else row.peak_bytes / 2**20),
        _number(row.error_max_ulps),
        _number(row.error_mean_ulps),
    ]


def _times(row: BenchRow, has_products: bool) -> list[str | Text]:
    """Return what follows from the time of a row."""
    return [
        Text(f"{row.speedup:.2f}", style=_style(row)),
        _number(row.median_us),
        f"{50 * (row.q3_us - row.q1_us) / row.median_us:.0f}%",
        _number(row.tflop_per_s if has_products else row.gb_per_s),
        f"{100 * row.limit_share:.0f}%" + "*" * row.in_cache,
    ]


def _who(row: BenchRow) -> str:
    return f"{row.variant} ({row.backend})" if row.variant == "fusedops" else row.variant


def _style(row: BenchRow) -> str:
    """Green where the whole spread is above eager, red where it is below."""
    if not row.ours or ":" in row.variant:
        return ""
    return "green" if row.speedup_q1 > 1 else "red" if row.speedup_q3 < 1 else ""


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def warnings(record: BenchRecord) -> list[str]:
    """Return what the reader must know before trusting the times."""
    warnings = []
    discarded = sum(row.discarded for row in record.rows)
    samples = discarded + sum(row.samples for row in record.rows)
    if discarded:
        warnings.append(
            f"{discarded} of {samples} samples were disturbed by other work and do not count"
        )
    limits = (record.limits["copy"], *record.limits["matmul"].values())
    if not all(limit.get("trusted", True) for limit in limits):
        warnings.append(
            "the limits were measured while other work ran: they may be too low, and the shares "
            "of them too high"
        )
    doubtful = sum(not row.trusted for row in record.rows)
    if doubtful:
        warnings.append(
            f"{doubtful} of {len(record.rows)} rows had too few samples that other work did not "
            "disturb: they have no times here (trusted is false in JSON and CSV); measure again "
            "on a quiet machine, or with a larger --seconds"
        )
    notes = dict.fromkeys(f"{row.op}: {row.note}" for row in record.rows if row.note)
    return [*warnings, *notes]
