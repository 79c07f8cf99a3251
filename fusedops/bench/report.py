"""A record as tables in the terminal and as a picture: what is gained, then what it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedops.bench import svg
from fusedops.bench.results import AUTOMATIC, COMPILE, EAGER, BenchRecord, BenchRow
from fusedops.terminal.console import DISTURBED, number_columns, print_table

_WIDE = 132


def show(record: BenchRecord, out: Console) -> None:
    """Print machine and limits, the tables of ops or of whole models, and what to know of them."""
    _show_limits(record, out)
    (_show_models if "patch" in record.settings else _show_ops)(record, out)
    for note in (*record.notes, *_warnings(record)):
        out.print(Text(f"note: {note}", style="red" if note.startswith("WRONG") else "yellow"))


def draw(record: BenchRecord) -> str:
    """Return an SVG with a bar per row of ours: times faster than eager."""
    lines = [
        svg.Bar(
            f"{ours.op} {ours.direction} {ours.case} {ours.dtype}",
            ours.speedup if ours.trusted else None,
            case[COMPILE].speedup if COMPILE in case and case[COMPILE].trusted else None,
        )
        for case in record.cases()
        if (ours := case.get(AUTOMATIC)) is not None
    ]
    return svg.bars(f"Times faster than eager ({record.machine['slug']})", lines)


def verdict(
    slower: Sequence[BenchRow], doubtful: Sequence[BenchRow], ratio: float, judged: int
) -> list[str]:
    """Return the lines that name the rows of models which are slower than they may be."""
    lines = [f"{judged} rows of fusedops judged, at least {ratio:g} of the fastest other wanted"]
    for word, rows in (("slower", slower), ("not judged, disturbed while measured", doubtful)):
        lines += [
            f"{word}: {' '.join(row.key[:-1])}: {row.lead:.2f}x of {row.rival} "
            f"(middle half {row.lead_q1:.2f}-{row.lead_q3:.2f})"
            for row in rows
        ]
    return lines if slower else [*lines, "no row is slower"]


def _show_limits(record: BenchRecord, out: Console) -> None:
    """Print where it was measured and what that machine can do."""
    machine, limits = record.machine, record.limits
    threads = f", {machine['threads']} threads" if machine["threads"] else ""
    out.print(
        f"[bold]{machine['slug']}[/]: {machine['name']}{threads}, "
        f"torch {record.versions['torch']}, allocator {record.settings['allocator']}"
    )
    parts = [f"copy {limits['copy']['rate'] / 1e9:.1f} GB/s ({limits['copy']['way']})"]
    for dtype, limit in limits["matmul"].items():
        others = "".join(f"; {way} {rate / 1e12:.2f}" for way, rate in limit["others"].items())
        rate = f"{limit['rate'] / 1e12:.2f} TFLOP/s ({limit['way']}{others})"
        parts.append(f"{dtype} matmul {rate}")
    out.print("measured limits: " + ", ".join(parts))


def _show_ops(record: BenchRecord, out: Console) -> None:
    narrow = out.width < _WIDE
    for (op, dtype), part in record.parts().items():
        print_table(out, _op_table(op, dtype, part, narrow))
    if narrow:
        out.print(f"{_WIDE} columns also show spread, host overhead, mean error", style="dim")
    if any(row.in_cache for row in record.rows):
        out.print(
            "* part of it stays in the last cache: may exceed the limit of memory", style="dim"
        )


def _op_table(op: str, dtype: str, part: BenchRecord, narrow: bool) -> Table:
    rows, allocator = part.rows, part.settings["allocator"]
    has_products = any(row.tflop_per_s for row in rows)
    figures = (
        *("x eager", "time us", "+-", "TFLOP/s" if has_products else "GB/s", "of limit"),
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
        ours = row.variant == AUTOMATIC
        table.add_row(
            *(before if first else ("", "")),
            f"{row.variant} ({row.backend})" if ours else row.variant,
            *itertools.compress(_op_figures(row, has_products), shown),
            style="bold" if ours else "",
            end_section=last,
        )
    return table


def _op_figures(row: BenchRow, has_products: bool) -> list[str | Text]:
    times: list[str | Text] = [DISTURBED, "-", "-", "-", "-"]
    if row.trusted:
        style = _style(row.speedup_q1, row.speedup_q3) if row.variant == AUTOMATIC else ""
        times = [
            Text(f"{row.speedup:.2f}", style=style),
            _number(row.median_us),
            f"{50 * (row.q3_us - row.q1_us) / row.median_us:.0f}%",
            _number(row.tflop_per_s if has_products else row.gb_per_s),
            _share(row),
        ]
    return [
        *times,
        _number(row.host_us),
        _number(None if row.peak_bytes is None else row.peak_bytes / 2**20),
        _number(row.error_max_ulps),
        _number(row.error_mean_ulps),
    ]


def _share(row: BenchRow) -> str:
    return f"{100 * row.limit_share:.0f}%" + "*" * row.in_cache


def _style(low: float, high: float) -> str:
    """Green where both quartiles are above the other's time, red where they are below."""
    return "green" if low > 1 else "red" if high < 1 else ""


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _show_models(record: BenchRecord, out: Console) -> None:
    table = Table(
        *("model", "size", "mode", "dtype"),
        *number_columns("eager ms", "compile ms", "fusedops ms", "x fastest", "quartiles"),
        *number_columns("of limit", "peak MiB", "ulp mean"),
        title=f"whole models, {record.settings['patch']} (allocator "
        f"{record.settings['allocator']} for all)",
        title_justify="left",
        title_style="bold",
    )
    before = ""
    for case in record.cases():
        first = next(iter(case.values()))
        if before not in ("", first.op):
            table.add_section()
        before = first.op
        table.add_row(first.op, first.case, first.direction, first.dtype, *_model_figures(case))
    print_table(out, table)
    out.print(
        "x fastest: time of the faster of eager and compile by ours, median of the rounds; "
        "peak: eager's, then ours",
        style="dim",
    )


def _model_figures(case: dict[str, BenchRow]) -> list[str | Text]:
    ours = case.get(AUTOMATIC)
    times: list[str | Text] = [
        _milliseconds(case[who]) if who in case else "-" for who in (EAGER, COMPILE, AUTOMATIC)
    ]
    if ours is None or ours.lead is None or ours.lead_q1 is None or ours.lead_q3 is None:
        return [*times, Text("wrong", style="red"), *["-"] * 4]
    compared: list[str | Text] = [DISTURBED, "-", "-"]
    if ours.trusted:
        style = f"bold {_style(ours.lead_q1, ours.lead_q3)}".strip()
        lead = Text(f"{ours.lead:.2f}", style=style)
        compared = [lead, f"{ours.lead_q1:.2f}-{ours.lead_q3:.2f}", _share(ours)]
    peaks = [case[EAGER].peak_bytes, ours.peak_bytes]
    return [
        *times,
        *compared,
        " ".join("-" if peak is None else f"{peak / 2**20:.0f}" for peak in peaks),
        " ".join(f"{row.error_mean_ulps:.2g}" for row in (case[EAGER], ours)),
    ]


def _milliseconds(row: BenchRow) -> str:
    if not row.trusted:
        return DISTURBED
    return f"{row.median_us / 1e3:.1f}" if row.median_us < 1e6 else f"{row.median_us / 1e3:.0f}"


def _warnings(record: BenchRecord) -> list[str]:
    """Return what the reader must know before trusting the times."""
    warnings = []
    discarded = sum(row.discarded for row in record.rows)
    samples = discarded + sum(row.samples for row in record.rows)
    if discarded:
        warnings.append(
            f"{discarded} of {samples} samples were disturbed by other work and do not count"
        )
    limits: tuple[dict[str, Any], ...] = (record.limits["copy"], *record.limits["matmul"].values())
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
