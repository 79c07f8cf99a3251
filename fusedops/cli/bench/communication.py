"""The command line of ``fusedops bench communication``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, show_table
from fusedops.terminal.progress import activity, steps
from fusedops.terminal.sizes import parse_bytes, show_bytes

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
        output.check_outputs(json_file, svg_file, out)
        if fit is not None:
            from fusedops.cli.bench import communication_fit

            communication_fit.fit(fit, predict, out)
            return
        if predict is not None or out is not None:
            raise files.UserError("--predict and --out need --fit FILE.csv")
        from fusedops._core import env
        from fusedops.bench.communication import BACKENDS, COLLECTIVES, sizes
        from fusedops.launch.job import join_job
        from fusedops.launch.processes import initialize_distributed, launch

        names = options.words(collectives or ",".join(COLLECTIVES), COLLECTIVES, "collectives")
        chosen = options.words(backends, BACKENDS, "backends") if backends else []
        with files.user_errors(ValueError):
            bytes_of = sizes(parse_bytes(least), parse_bytes(most))
        if not bytes_of:
            raise files.UserError(
                f"no power of two lies from --least {least} to --most {most}: make --most larger"
            )
        join_job()
        if env.launched() is None:
            raise SystemExit(launch(ranks, sys.argv[1:]))
        with files.user_errors(RuntimeError), initialize_distributed(device) as here:
            rows, slow = _measure(here, chosen, names, bytes_of, seconds, links)
            if not here.rank:
                _deliver(rows, slow, here, json_file, svg_file)


def _measure(
    ranks: Ranks,
    backends: list[str],
    names: list[str],
    bytes_of: list[int],
    seconds: float,
    with_links: bool,
) -> tuple[list[CommunicationRow], list[LinkRow]]:
    """Measure on all ranks; the first one shows the progress."""
    from fusedops.bench import communication as bench

    first = ranks.rank == 0
    backends = backends or bench.usual_backends(ranks)
    with steps(len(backends) * len(names)) if first else nullcontext() as progress:
        report = progress.done if progress else lambda text: None
        rows = bench.measure(ranks, backends, names, bytes_of, seconds, report)
    with activity("links of every pair of ranks", visible=first):
        return rows, bench.links(ranks, backends[0], bytes_of[-1]) if with_links else []


def _deliver(
    rows: list[CommunicationRow],
    links: list[LinkRow],
    ranks: Ranks,
    json_file: Path | None,
    svg_file: Path | None,
) -> None:
    """Print the rows and write the files."""
    from fusedops.bench import machine, svg
    from fusedops.cli.bench.communication_fit import show_curves
    from fusedops.planner.communication import CommunicationModel

    keys = [(row.collective, row.backend, str(row.ranks)) for row in rows]
    times = [row.avg_us * 1e-6 for row in rows]
    sizes = [row.bytes for row in rows]
    model = CommunicationModel.fit(zip(keys, sizes, times, strict=True))
    residuals = [
        model.curves[key].seconds(size) / took - 1
        for key, size, took in zip(keys, sizes, times, strict=True)
    ]
    pairs = list(zip(rows, residuals, strict=True))

    def show(out: Console) -> None:
        _show_rows(pairs, out)
        show_curves(model, ("collective", "backend", "ranks"), out)
        if links:
            _show_links(links, out)

    def picture() -> str:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = f"{row.collective}, {row.backend}"
            series.setdefault(name, []).append((row.bytes, row.busbw / 1e9))
        return svg.lines(f"{ranks.size} ranks", "bytes", "bus bandwidth, GB/s", series)

    record = {
        **machine.describe(ranks.device),
        "created": machine.now(),
        "rows": [asdict(row) | {"residual": residual} for row, residual in pairs],
        "curves": [
            {"collective": collective, "backend": backend, "ranks": int(count)}
            | {"nodes": rows[0].nodes}
            | asdict(curve)
            for (collective, backend, count), curve in model.curves.items()
        ],
        "links": [asdict(link) for link in links],
    }
    output.deliver(record, json_file, show, output.text_file(svg_file, picture))
    wrong = [row for row in rows if row.wrong]
    if wrong:
        first = wrong[0]
        raise files.UserError(
            f"{len(wrong)} rows have wrong values, the first is {first.collective} by "
            f"{first.backend} of {first.bytes} bytes: {first.wrong} elements; their network or "
            "their library is defective: leave the backend out by --backends"
        )


def _show_rows(pairs: list[tuple[CommunicationRow, float]], out: Console) -> None:
    first = pairs[0][0]
    names = ("bytes", "min us", "avg us", "max us", "algbw GB/s", "busbw GB/s", "fit", "wrong")
    cells = (
        (
            row.collective,
            row.backend,
            show_bytes(row.bytes),
            *(f"{value:.1f}" for value in (row.min_us, row.avg_us, row.max_us)),
            *(f"{value / 1e9:.2f}" for value in (row.algbw, row.busbw)),
            f"{100 * residual:+.0f} %",
            row.wrong,
        )
        for row, residual in pairs
    )
    nodes = f"{first.nodes} {'node' if first.nodes == 1 else 'nodes'}"
    title = f"{first.ranks} ranks on {nodes}, float32"
    show_table(out, ("collective", "backend", *number_columns(*names)), cells, title=title)


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
