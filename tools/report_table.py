"""The tables under docs/reports: written, read and compared in one way.

A table is a CSV file with one row per compiled kernel. Its first line names the compiler whose
figures these are: numbers of another version are not compared, the fixed rules (no stack, matrix
instructions, shared memory) hold for any.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Row = dict[str, str]
REPORTS = Path(__file__).resolve().parent.parent / "docs" / "reports"


@dataclasses.dataclass(frozen=True)
class Table:
    """A report: where it is kept, what identifies a row, and what may not grow."""

    path: Path  # the CSV file that is committed
    command: str  # what writes it, for the messages
    compiler: str  # name and version of what made the figures
    keys: tuple[str, ...]  # columns that identify a row
    bounded: tuple[str, ...]  # of figures that may not rise; empty ones are not compared
    problems: Callable[[Row], list[str]]  # a sentence for each fixed rule that a row violates
    # Column that says which sources the figures are of, if there is one: a committed row of other
    # sources is stale even where its figures are the same.
    digest: str = ""
    not_below: tuple[str, ...] = ()  # columns of figures that may not fall


def figures(table: Table) -> dict[str, Row]:
    """Return the committed figures of this compiler by their digest, without name and digest."""
    if not table.path.exists():
        return {}
    compiler, rows = _read(table)
    if compiler != table.compiler:
        return {}
    named = {*table.keys, table.digest}
    return {
        row[table.digest]: {column: row[column] for column in row if column not in named}
        for row in rows
        if row.get(table.digest)
    }


def rows(path: Path) -> list[Row]:
    """Return the rows of a committed table."""
    with path.open(newline="") as file:
        file.readline()
        return list(csv.DictReader(file))


def show(rows: Sequence[Row]) -> None:
    """Print rows in columns."""
    columns = list(rows[0]) if rows else []
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    for line in [columns, *([row[column] for column in columns] for row in rows)]:
        pairs = zip(line, widths, strict=True)
        print("  ".join(each.ljust(width) for each, width in pairs).rstrip())


def finish(
    table: Table,
    rows: Sequence[Row],
    *,
    check: bool,
    only: Callable[[Row], bool] | None = None,
) -> int:
    """Write the table, or compare with the committed one; returns the exit code.

    ``only`` tells which rows of the table these are all of: the others stay as they are.
    """
    rows = sorted(rows, key=lambda row: [row[key] for key in table.keys])
    where = table.path.relative_to(REPORTS.parent.parent)
    broken = [f"{_name(table, row)}: {each}" for row in rows for each in table.problems(row)]
    names = [_name(table, row) for row in rows]
    broken += sorted({f"{each}: two rows of this name" for each in names if names.count(each) > 1})
    changed = _differences(table, rows, only) if check else []
    for line in broken + changed:
        print(f"{where}: {line}", file=sys.stderr)
    if changed:
        print(f"If this is intended: {table.command}, and commit {where}.", file=sys.stderr)
    if not check:
        others = []
        if only and table.path.exists():
            compiler, committed = _read(table)
            if compiler != table.compiler:
                print(f"{where}: written by {compiler}: write all of it anew", file=sys.stderr)
                return 1
            others = [row for row in committed if not only(row)]
        _write(table, sorted([*rows, *others], key=lambda row: [row[key] for key in table.keys]))
    if not broken and not changed:
        print(f"{where}: {len(rows)} kernels, {'as committed' if check else 'written'}")
    return int(bool(broken or changed))


def _differences(
    table: Table, rows: Sequence[Row], only: Callable[[Row], bool] | None
) -> list[str]:
    if not table.path.exists():
        return ["the file is missing"]
    compiler, committed = _read(table)
    if only:
        committed = [row for row in committed if only(row)]
    before = {_name(table, row): row for row in committed}
    now = {_name(table, row): row for row in rows}
    found = [f"{name}: a new kernel without a row" for name in now.keys() - before.keys()]
    found += [f"{name}: the kernel of this row is gone" for name in before.keys() - now.keys()]
    if compiler != table.compiler:
        print(f"figures not compared: committed ones are of {compiler}, this is {table.compiler}")
        return sorted(found)
    compared = [(column, 1, "rose") for column in table.bounded]
    compared += [(column, -1, "fell") for column in table.not_below]
    for name in now.keys() & before.keys():
        for column, sign, verb in compared:
            was, new = before[name].get(column, ""), now[name].get(column, "")
            if was and new and sign * float(new) > sign * float(was):
                found.append(f"{name}: {column} {verb} from {was} to {new}")
    stale = [
        name
        for name in sorted(now.keys() & before.keys())
        if table.digest and before[name].get(table.digest) != now[name][table.digest]
    ]
    if stale:
        more = "" if len(stale) == 1 else f" and {len(stale) - 1} more"
        found.append(f"{stale[0]}{more}: changed after the row was written")
    return sorted(found)


def _name(table: Table, row: Row) -> str:
    return " ".join(row[key] for key in table.keys if row[key])


def _write(table: Table, rows: Sequence[Row]) -> None:
    table.path.parent.mkdir(parents=True, exist_ok=True)
    with table.path.open("w", newline="") as file:
        file.write(f"# {table.compiler}; written by {table.command}\n")
        if rows:
            columns = list(dict.fromkeys(column for row in rows for column in row))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _read(table: Table) -> tuple[str, list[Row]]:
    with table.path.open(newline="") as file:
        compiler = file.readline().removeprefix("# ").split(";")[0].strip()
        return compiler, list(csv.DictReader(file))
