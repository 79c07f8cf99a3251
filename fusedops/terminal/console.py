"""The console for results: tables that lose nothing, whatever the width."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

# What is no terminal has no width: lines are as long as they need.
_UNLIMITED = 10_000


def console() -> Console:
    """Return the console for results: as wide as the terminal, unlimited where there is none."""
    probe = Console()
    return probe if probe.is_terminal else Console(width=_UNLIMITED)


def number_columns(*names: str) -> list[Column]:
    """Return columns of a table that are aligned to the right, and never wrapped."""
    return [Column(name, justify="right") for name in names]


def print_table(out: Console, table: Table) -> None:
    """Print a table without cutting anything off.

    Where the terminal is narrower than the table, columns of words are wrapped. Numbers are not:
    where these do not fit either, the terminal itself breaks the lines.
    """
    for column in table.columns:
        column.no_wrap, column.overflow = column.justify == "right", "fold"
    natural = Measurement.get(out, out.options.update(width=_UNLIMITED), table)
    wraps = out.is_terminal and natural.minimum <= out.width
    needed = natural.minimum if wraps else natural.maximum
    width, out.width = out.width, max(out.width, needed)
    out.print(table, crop=False)
    out.width = width
