"""A record of whole models as a table and as a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedops.bench.contenders import COMPILE, EAGER
from fusedops.bench.results import BenchRecord, BenchRow
from fusedops.bench.table import show_limits, warnings
from fusedops.terminal.console import DISTURBED, number_columns, print_table


def show(record: BenchRecord, out: Console) -> None:
    """Print machine and limits, a line per model, mode and dtype, and what to know about them."""
    show_limits(record, out)
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
        table.add_row(first.op, first.case, first.direction, first.dtype, *_figures(case))
    print_table(out, table)
    out.print(
        "x fastest: time of the faster of eager and compile by ours, median of the rounds; "
        "peak: eager's, then ours",
        style="dim",
    )
    for note in (*record.notes, *warnings(record)):
        wrong = note.startswith("WRONG")
        out.print(Text(f"note: {note}", style="red" if wrong else "yellow"))


def verdict(
    slower: Sequence[BenchRow], doubtful: Sequence[BenchRow], ratio: float, judged: int
) -> list[str]:
    """Return the lines that name the rows which are slower than they may be."""
    lines = [f"{judged} rows of fusedops judged, at least {ratio:g} of the fastest other wanted"]
    lines += [f"slower: {_line(row)}" for row in slower]
    lines += [f"not judged, disturbed while measured: {_line(row)}" for row in doubtful]
    return lines if slower else [*lines, "no row is slower"]


def _line(row: BenchRow) -> str:
    assert row.lead is not None
    return (
        f"{' '.join(row.key[:-1])}: {row.lead:.2f}x of {row.rival} "
        f"(middle half {row.lead_q1:.2f}-{row.lead_q3:.2f})"
    )


def _figures(case: dict[str, BenchRow]) -> list[str | Text]:
    ours = case.get("fusedops")
    times: list[str | Text] = [
        _ms(case[who]) if who in case else "-" for who in (EAGER, COMPILE, "fusedops")
    ]
    if ours is None or ours.lead is None or ours.lead_q1 is None or ours.lead_q3 is None:
        return [*times, Text("wrong", style="red"), *["-"] * 4]
    style = "green" if ours.lead_q1 > 1 else "red" if ours.lead_q3 < 1 else ""
    peaks = [case[EAGER].peak_bytes, ours.peak_bytes]
    compared: list[str | Text] = [DISTURBED, "-", "-"]
    if ours.trusted:
        compared = [
            Text(f"{ours.lead:.2f}", style=f"bold {style}".strip()),
            f"{ours.lead_q1:.2f}-{ours.lead_q3:.2f}",
            f"{100 * ours.limit_share:.0f}%" + "*" * ours.in_cache,
        ]
    return [
        *times,
        *compared,
        " ".join("-" if peak is None else f"{peak / 2**20:.0f}" for peak in peaks),
        " ".join(f"{row.error_mean_ulps:.2g}" for row in (case[EAGER], ours)),
    ]


def _ms(row: BenchRow) -> str:
    if not row.trusted:
        return DISTURBED
    return f"{row.median_us / 1e3:.1f}" if row.median_us < 1e6 else f"{row.median_us / 1e3:.0f}"
