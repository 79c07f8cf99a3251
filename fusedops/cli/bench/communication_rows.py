"""What ``fusedops bench communication`` shows of collectives, and curves that are fitted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from fusedops.bench import machine, svg
from fusedops.bench.communication import SLOW, CommunicationRow, LinkRow
from fusedops.bench.tables import csv_text, load_rows
from fusedops.cli import output
from fusedops.launch.processes import Ranks
from fusedops.planner.communication import CommunicationModel
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.sizes import show_bytes

# Columns of a table of collectives that are measured; all others say what was.
_MEASURED = ("bytes", "time_us", "algbw_gbs", "busbw_gbs")
_PREDICTED = ("predicted_us", "why")


def deliver(
    rows: list[CommunicationRow],
    links: list[LinkRow],
    ranks: Ranks,
    json_file: Path | None,
    svg_file: Path | None,
) -> None:
    """Show the rows and write the files."""
    samples = [
        ((row.collective, row.backend, str(row.ranks)), row.bytes, row.avg_us * 1e-6)
        for row in rows
    ]
    model = CommunicationModel.fit(samples)
    residuals = [model.curves[key].seconds(size) / took - 1 for key, size, took in samples]
    pairs = list(zip(rows, residuals, strict=True))

    def show(out: Console) -> None:
        _show_rows(pairs, out)
        _show_curves(model, ("collective", "backend", "ranks"), out)
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
            {"collective": name, "backend": backend, "ranks": int(count), "nodes": rows[0].nodes}
            | asdict(curve)
            for (name, backend, count), curve in model.curves.items()
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
    cells = []
    for row, residual in pairs:
        times = (f"{value:.1f}" for value in (row.min_us, row.avg_us, row.max_us))
        rates = (f"{value / 1e9:.2f}" for value in (row.algbw, row.busbw))
        figures = show_bytes(row.bytes), *times, *rates, f"{100 * residual:+.0f} %", row.wrong
        cells.append((row.collective, row.backend, *figures))
    nodes = f"{first.nodes} {'node' if first.nodes == 1 else 'nodes'}"
    title = f"{first.ranks} ranks on {nodes}, float32"
    show_table(out, ("collective", "backend", *number_columns(*names)), cells, title=title)


def _show_links(links: list[LinkRow], out: Console) -> None:
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


def fit(path: Path, predict: Path | None, out: Path | None) -> None:
    """Fit the rows of a CSV file and predict those of another."""
    if (predict is None) != (out is None):
        raise files.UserError("--predict FILE.csv and --out FILE.csv belong together")
    rows = load_rows(path)
    columns = [name for name in rows[0] if name not in _MEASURED]
    model = CommunicationModel.fit(
        (
            tuple(row[name] for name in columns),
            _positive(row, "bytes", path),
            1e-6 * _positive(row, "time_us", path),
        )
        for row in rows
    )
    _show_curves(model, columns, console())
    if predict is not None and out is not None:
        _predict(model, columns, load_rows(predict), out)


def _predict(
    model: CommunicationModel, columns: Sequence[str], rows: list[dict[str, str]], out: Path
) -> None:
    errors, predictions = [], []
    for row in rows:
        cells = dict.fromkeys(_PREDICTED, "")
        curve = model.curves.get(tuple(row.get(name, "") for name in columns))
        size = _number(row.get("bytes", ""))
        if curve is None:
            cells["why"] = f"no row that was fitted has these {', '.join(columns)}"
        elif size is None:
            cells["why"] = f"bytes = {row.get('bytes', '')!r} is not a positive number"
        else:
            predicted = 1e6 * curve.seconds(size)
            cells["predicted_us"] = f"{predicted:.6g}"
            measured = _number(row.get("time_us", ""))
            if measured:
                errors.append(abs(predicted / measured - 1))
        predictions.append({**row, **cells})
    files.write_text(out, csv_text(predictions, [*rows[0], *_PREDICTED]))
    if errors:
        print(
            f"{len(errors)} measured rows: median error {100 * statistics.median(errors):.1f} %, "
            f"largest {100 * max(errors):.1f} %"
        )
    print(f"wrote {out}")


def _number(text: str) -> float | None:
    """Return a positive number, or ``None`` where a cell is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _positive(row: Mapping[str, str], name: str, path: Path) -> float:
    value = _number(row.get(name, ""))
    if value is None:
        raise files.UserError(
            f"{path}: {name} = {row.get(name, '')!r} is not a positive number, in the row "
            f"{', '.join(row.values())}: correct the row, or remove it"
        )
    return value


def _show_curves(model: CommunicationModel, key: Sequence[str], out: Console) -> None:
    """Print the curves; ``key`` names what their keys hold."""
    figures = number_columns("latency us", "regimes from bytes", "GB/s of each")
    cells = []
    for values, curve in model.curves.items():
        knees = " ".join(show_bytes(knee) for knee in (0, *curve.knees))
        rates = " ".join(f"{1e-9 / slope:.2f}" if slope else "-" for slope in curve.slopes)
        cells.append((*values, f"{1e6 * curve.latency:.1f}", knees, rates))
    title = "time = latency + bytes / bandwidth, by regime"
    show_table(out, (*key, *figures), cells, title=title)
