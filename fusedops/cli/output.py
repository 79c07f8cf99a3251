"""What commands do with a result: show it, or print it as JSON, and write the files asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedops.terminal import files
from fusedops.terminal.console import console, print_line

if TYPE_CHECKING:
    from rich.console import Console

# A file, if it was asked for, and what writes it.
Writer = tuple[str | Path | None, Callable[[Any], object]]


def check_outputs(*paths: str | Path | None, results: Path | None = None) -> None:
    """Raise before anything is measured where a file, or one in ``results``, cannot be written."""
    for path in paths:
        if path and path != "-":
            files.check_writable(path)
    if results is not None:
        files.make_folder(results)
        files.check_writable(results / "probe")


def json_file(path: str | Path | None, record: Any) -> Writer:
    """Return what writes a record, if its file was asked for."""
    return path, partial(files.write_json, value=record)


def text_file(path: str | Path | None, make: Callable[[], str]) -> Writer:
    """Return what makes a text and writes it, if its file was asked for."""
    return path, lambda target: files.write_text(target, make())


def write_all(writers: Iterable[Writer], out: Console) -> None:
    """Write each file that was asked for, and tell so; one that cannot be costs no other.

    Raises:
        UserError: for all that failed, at the end.
    """
    failures = []
    for path, write in writers:
        if not path:
            continue
        try:
            write(path)
            print_line(out, f"wrote {path}")
        except files.UserError as error:
            failures.append(str(error))
    if failures:
        raise files.UserError("; ".join(failures))


def deliver(
    record: Any, path: str | Path | None, show: Callable[[Console], object], *others: Writer
) -> None:
    """Show a result and write its files: a full disk must not cost what is shown.

    Args:
        record: what JSON gets.
        path: of the JSON; ``"-"``: print it, and nothing else.
        show: prints the result.
        *others: further files.
    """
    if path == "-":
        print(json.dumps(record, indent=1))
        return
    out = console()
    show(out)
    write_all([json_file(path, record), *others], out)
