"""The console for results: tables that lose nothing, whatever the width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

# What is no terminal has no width: lines are as long as they need.
_UNLIMITED = 10_000
# Instead of a time that other work on the machine disturbed.
DISTURBED = "disturbed"


def console() -> Console:
    """Return the console for results: as wide as the terminal, unlimited where there is none."""
    from rich.console import Console

    probe = Console(highlight=False)
    return probe if probe.is_terminal else Console(width=_UNLIMITED, highlight=False)


def number_columns(*names: str) -> list[Column]:
    """Return columns of a table that are aligned to the right, and never wrapped."""
    from rich.table import Column

    return [Column(name, justify="right") for name in names]


def show_table(
    out: Console, columns: Iterable[Any], rows: Iterable[Iterable[Any]], **style: Any
) -> None:
    """Print a table without cutting anything off.

    Args:
        out: where.
        columns: their names, or ``number_columns``.
        rows: cells, which are shown as ``str`` has them.
        **style: further arguments of ``rich.table.Table``, such as ``title``.
    """
    from rich.table import Column, Table
    from rich.text import Text

    # A column has its cells: what describes one for several tables is copied.
    own = (column.copy() if isinstance(column, Column) else column for column in columns)
    table = Table(*own, **style)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    print_table(out, table)


def print_table(out: Console, table: Table) -> None:
    """Print a table without cutting anything off.

    Where the terminal is narrower than the table, columns of words are wrapped. Numbers are not:
    where these do not fit either, the terminal itself breaks the lines.
    """
    from rich.measure import Measurement

    for column in table.columns:
        column.no_wrap, column.overflow = column.justify == "right", "fold"
    natural = Measurement.get(out, out.options.update(width=_UNLIMITED), table)
    wraps = out.is_terminal and natural.minimum <= out.width
    needed = natural.minimum if wraps else natural.maximum
    width, out.width = out.width, max(out.width, needed)
    out.print(table, crop=False)
    out.width = width


def print_line(out: Console, text: str, style: str = "") -> None:
    """Print a line as it is: brackets have no meaning, and only the terminal breaks it."""
    out.print(text, style=style or None, markup=False, soft_wrap=True)
