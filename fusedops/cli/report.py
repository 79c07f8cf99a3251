"""``fusedops profile`` and ``fusedops report``: tables of a run's steps, and a page of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fusedops.cli import output
from fusedops.terminal import files
from fusedops.terminal.progress import activity

if TYPE_CHECKING:
    from rich.console import Console


def report(
    run: Annotated[str, Argument(help="Folder of a run of fusedops train.")],
    out: Annotated[str, Option(help="File to write; default: report.html in the run.")] = "",
    plan: Annotated[str, Option(help="JSON of fusedops plan time, to compare.")] = "",
) -> None:
    """Write one HTML file with the curves, ranks, memory, communication and findings of a run.

    docs/observe.md has pictures of it.
    """
    with files.one_line_errors():
        record = _read_plan(Path(plan)) if plan else None
        if not Path(run).is_dir():
            raise files.UserError(f"{run} is no folder of a run: fusedops train writes it at `out`")
        file = Path(out or Path(run) / "report.html")
        files.check_writable(str(file))
        from fusedops.cli.report_page import page

        with activity(f"reading {run}"):
            text = page(run, record)
        files.write_text(str(file), text)
        print(f"wrote {file} ({len(text) / 1e6:.1f} MB): open it in a browser")


def profile(
    folder: Annotated[str, Argument(help="A run, or a folder of torch.profiler's traces.")],
    compare: Annotated[str, Option(help="Another such folder, to compare with.")] = "",
    worst: Annotated[int, Option(min=1, help="Slowest ranks to show.")] = 5,
    json_file: Annotated[str, Option("--json", help="Write a file; -: print it instead.")] = "",
    trace_file: Annotated[str, Option("--trace", help="Merge traces, for ui.perfetto.dev.")] = "",
) -> None:
    """Print where the steps of each rank spend their time, and what a job could gain.

    docs/observe.md explains the columns.
    """
    with files.one_line_errors():
        output.check_outputs(json_file, trace_file)
        from fusedops.cli import report_page as tables

        profiled = tables.read(folder)
        if trace_file and not profiled.traces:
            raise files.UserError(
                f"--trace merges traces of torch.profiler, and {folder} has the records of a run"
            )

        def show(out: Console) -> None:
            tables.show(profiled, worst, out)
            if compare:
                tables.compare(profiled, tables.read(compare), out)

        trace = output.text_file(trace_file, lambda: tables.trace_text(profiled, worst))
        output.deliver(tables.record(profiled), json_file, show, trace)


def _read_plan(path: Path) -> dict[str, Any]:
    record = files.read_json(path)
    layouts = record.get("layouts") if isinstance(record, dict) else None
    if not isinstance(layouts, list) or not all(isinstance(row, dict) for row in layouts):
        raise files.UserError(f"{path} is no plan: fusedops plan time --device --json writes one")
    return record
