"""The command line of ``fusedops bench communication``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.bench.communication import CommunicationRow, LinkRow
    from fusedops.launch.processes import Ranks


def communication(
    ranks: Annotated[
        int, typer.Option(min=2, help="Processes on this machine; torchrun's where it runs this.")
    ] = 2,
    collectives: Annotated[str, typer.Option(help="Comma-separated names; default: all.")] = "",
    backends: Annotated[
        str, typer.Option(help="gloo, shared_memory, nccl; default: all that are here.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    least: Annotated[str, typer.Option(help="Smallest size.")] = "1KiB",
    most: Annotated[str, typer.Option(help="Largest size.")] = "64MiB",
    seconds: Annotated[float, options.seconds_per("row", most=60)] = 0.25,
    links: Annotated[
        bool, typer.Option("--links", help="Also measure each pair of ranks.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write rows and curves, which the planner reads.")
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", help="Draw bus bandwidth over size.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Measure nothing: fit the measured times of a CSV file.")
    ] = None,
    predict: Annotated[
        Path | None, typer.Option(help="With --fit: a CSV file of sizes to predict.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --predict: the file to write.")] = None,
) -> None:
    """Measure every collective of the stack by size, and fit latency and bandwidth.

    Sizes and bandwidths follow the conventions of nccl-tests. On several machines, start it on each
    with torchrun. docs/communication.md.
    """
    with files.one_line_errors():
        files.check_environment()
        options.check_outputs((json_file, svg_file, out), None)
        if fit is not None:
            from fusedops.cli.bench import communication_fit

            communication_fit.fit(fit, predict, out)
            return
        if predict is not None or out is not None:
            raise files.UserError("--predict and --out need --fit FILE.csv")
        from fusedops._core import env
        from fusedops.bench.communication import BACKENDS, COLLECTIVES, sizes

        names = options.words(collectives or ",".join(COLLECTIVES), COLLECTIVES, "collectives")
        chosen = options.words(backends, BACKENDS, "backends") if backends else []
        bytes_of = sizes(_bytes(least), _bytes(most))
        if not bytes_of:
            raise files.UserError(
                f"no power of two lies from --least {least} to --most {most}: make --most larger"
            )
        from fusedops.launch.config_table import InputError
        from fusedops.launch.job import join_job

        try:
            join_job()
        except InputError as error:
            raise files.UserError(str(error)) from None
        if env.launched() is None:
            from fusedops.launch.processes import launch

            raise SystemExit(launch(ranks, sys.argv[1:]))
        _measure(device, chosen, names, bytes_of, seconds, links, json_file, svg_file)


def _measure(
    device: str,
    backends: list[str],
    names: list[str],
    bytes_of: list[int],
    seconds: float,
    with_links: bool,
    json_file: Path | None,
    svg_file: Path | None,
) -> None:
    from fusedops.bench import communication as bench
    from fusedops.launch.config_table import InputError
    from fusedops.launch.processes import initialize_distributed
    from fusedops.terminal.progress import activity, steps

    try:
        with initialize_distributed(device) as ranks:
            backends = backends or bench.usual_backends(ranks)
            if ranks.rank:
                measured = bench.measure(
                    ranks, backends, names, bytes_of, seconds, lambda text: None
                )
                slow = bench.links(ranks, backends[0], bytes_of[-1]) if with_links else []
                return
            with steps(len(backends) * len(names)) as progress:

                def report(text: str) -> None:
                    progress.describe(text)
                    progress.advance()

                measured = bench.measure(ranks, backends, names, bytes_of, seconds, report)
            with activity("links of every pair of ranks"):
                slow = bench.links(ranks, backends[0], bytes_of[-1]) if with_links else []
            _tell(measured, slow, ranks, json_file, svg_file)
    except (InputError, RuntimeError) as error:
        raise files.UserError(str(error)) from None


def _tell(
    rows: list[CommunicationRow],
    links: list[LinkRow],
    ranks: Ranks,
    json_file: Path | None,
    svg_file: Path | None,
) -> None:
    """Print the rows and write the files."""
    from fusedops.bench import machine, svg
    from fusedops.bench.results import now
    from fusedops.cli.bench.communication_fit import show_curves
    from fusedops.planner.communication import CommunicationModel
    from fusedops.terminal.console import console

    keys = [(row.collective, row.backend, str(row.ranks)) for row in rows]
    model = CommunicationModel.fit(
        (key, row.bytes, row.avg_us * 1e-6) for key, row in zip(keys, rows, strict=True)
    )
    residuals = [
        model.curves[key].seconds(row.bytes) / (row.avg_us * 1e-6) - 1
        for key, row in zip(keys, rows, strict=True)
    ]
    out = console()
    _show_rows(rows, residuals, out)
    show_curves(model, ("collective", "backend", "ranks"), out)
    if links:
        _show_links(links, out)
    record = {
        **machine.describe(ranks.device),
        "created": now(),
        "rows": [
            asdict(row) | {"residual": residual}
            for row, residual in zip(rows, residuals, strict=True)
        ],
        "curves": [
            dict(zip(("collective", "backend"), key, strict=False))
            | {"ranks": int(key[2]), "nodes": rows[0].nodes}
            | asdict(curve)
            for key, curve in model.curves.items()
        ],
        "links": [asdict(link) for link in links],
    }
    series = {
        f"{row.collective}, {row.backend}": [
            (other.bytes, other.busbw / 1e9)
            for other in rows
            if (other.collective, other.backend) == (row.collective, row.backend)
        ]
        for row in rows
    }
    picture = svg.lines(f"{ranks.size} ranks", "bytes", "bus bandwidth, GB/s", series)
    writers = (json_file, files.write_json), (svg_file, partial(_write_text, picture))
    options.write_all(record, writers, out)
    wrong = [row for row in rows if row.wrong]
    if wrong:
        first = wrong[0]
        raise files.UserError(
            f"{len(wrong)} rows have wrong values, the first is {first.collective} by "
            f"{first.backend} of {first.bytes} bytes: {first.wrong} elements; their network or "
            "their library is defective: leave the backend out by --backends"
        )


def _write_text(text: str, path: Path, _: object) -> None:
    files.write_text(path, text)


def _show_rows(rows: list[CommunicationRow], residuals: list[float], out: Console) -> None:
    from rich.table import Table

    from fusedops.terminal.console import number_columns, print_table
    from fusedops.terminal.sizes import show_bytes

    figures = number_columns(
        *("bytes", "min us", "avg us", "max us", "algbw GB/s", "busbw GB/s", "fit", "wrong")
    )
    table = Table(
        *("collective", "backend"),
        *figures,
        title=f"{rows[0].ranks} ranks on {rows[0].nodes} "
        f"{'node' if rows[0].nodes == 1 else 'nodes'}, float32",
    )
    for row, residual in zip(rows, residuals, strict=True):
        table.add_row(
            row.collective,
            row.backend,
            show_bytes(row.bytes),
            *(f"{value:.1f}" for value in (row.min_us, row.avg_us, row.max_us)),
            *(f"{value / 1e9:.2f}" for value in (row.algbw, row.busbw)),
            f"{100 * residual:+.0f} %",
            str(row.wrong),
        )
    print_table(out, table)


def _show_links(links: list[LinkRow], out: Console) -> None:
    from fusedops.bench.communication import SLOW

    slow = [link for link in links if link.slow]
    fastest, slowest = links[-1].bandwidth / 1e9, links[0].bandwidth / 1e9
    out.print(
        f"{len(links)} pairs of ranks: {slowest:.2f} to {fastest:.2f} GB/s in each direction; "
        f"{len(slow)} below {SLOW:.0%} of the median"
    )
    for link in slow:
        out.print(
            f"slow: ranks {link.first} ({link.hosts[0]}) and {link.second} ({link.hosts[1]}): "
            f"{link.bandwidth / 1e9:.2f} GB/s",
            style="red",
        )


def _bytes(text: str) -> int:
    from fusedops.terminal.sizes import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise files.UserError(str(error)) from None
