"""What commands do with a result: show it, or print it as JSON, and write the files asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fusedops.terminal import files
from fusedops.terminal.console import console, print_line

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.bench.results import BenchRecord

# A file, if it was asked for, and what writes it.
Writer = tuple[str | Path | None, Callable[[Any], object]]


@contextmanager
def checked(*paths: str | Path | None, results: Path | None = None) -> Iterator[None]:
    """Check environment and outputs, then run the block; a ``UserError`` ends it with a line."""
    with files.one_line_errors():
        files.check_environment()
        check_outputs(*paths, results=results)
        yield


def check_outputs(*paths: str | Path | None, results: Path | None = None) -> None:
    """Raise before anything is measured where a file, or one in ``results``, cannot be written."""
    for path in paths:
        if path and path != "-":
            files.check_writable(path)
    if results is not None:
        files.make_folder(results)
        files.check_writable(results / "probe")


def text_file(path: str | Path | None, make: Callable[[], str]) -> Writer:
    """Return what makes a text and writes it, if its file was asked for."""
    return path, lambda target: files.write_text(target, make())


def write_all(writers: Iterable[Writer], out: Console) -> None:
    """Write each file that was asked for, and tell so; one that cannot be costs no other."""
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

    JSON gets the record; a path of ``"-"`` prints it, and nothing else.
    """
    if path == "-":
        print(json.dumps(record, indent=1))
        return
    out = console()
    show(out)
    write_all([(path, partial(files.write_json, value=record)), *others], out)


def deliver_record(
    record: BenchRecord,
    json_file: Path | None,
    csv_file: Path | None,
    svg_file: Path | None,
    results: Path | None,
    *,
    name: str,
    complete: bool,
) -> None:
    """Show a record of ``fusedops bench`` and write its files; exit unless it is ``complete``.

    ``results`` gets a folder of the device, with a file for each op, or family, and dtype; their
    ``name`` is as ``save_parts`` takes it.
    """
    from fusedops.bench import report
    from fusedops.bench.results import save_csv, save_json, save_parts

    out = console()
    report.show(record, out)
    save = save_csv if name.endswith(".csv") else save_json
    write_all(
        [
            (json_file, partial(save_json, record=record)),
            (csv_file, partial(save_csv, record=record)),
            text_file(svg_file, partial(report.draw, record)),
            (results, partial(save_parts, record=record, name=name, save=save)),
        ],
        out,
    )
    if not complete:
        raise typer.Exit(130)  # as a shell says of an interrupted command


def source_script(path: str, command: str) -> Path:
    """Return a script of the source tree, which a wheel does not have.

    Args:
        path: of the script in the repository.
        command: what to run in a clone.
    """
    script = Path(__file__).resolve().parents[2] / path
    with files.one_line_errors():
        if not script.exists():
            raise files.UserError(
                f"{path} is a part of the source tree, and {script} does not exist: clone the "
                f"repository and run `{command}` there"
            )
    return script
