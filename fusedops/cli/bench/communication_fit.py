"""``fusedops bench communication --fit``: curves through the measured collectives of a CSV file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.sizes import show_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.planner.communication import CommunicationModel

# Columns of a table of collectives that are measured; all others say what was.
_MEASURED = ("bytes", "time_us", "algbw_gbs", "busbw_gbs")
_PREDICTED = ("predicted_us", "why")


def fit(path: Path, predict: Path | None, out: Path | None) -> None:
    """Fit the rows of a CSV file and predict those of another."""
    from fusedops.bench.tables import load_rows
    from fusedops.planner.communication import CommunicationModel

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
    show_curves(model, columns, console())
    if predict is not None and out is not None:
        _predict(model, columns, load_rows(predict), out)


def _predict(
    model: CommunicationModel, columns: Sequence[str], rows: list[dict[str, str]], out: Path
) -> None:
    from fusedops.bench.tables import csv_text

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


def show_curves(model: CommunicationModel, key: Sequence[str], out: Console) -> None:
    """Print the curves; ``key`` names what their keys hold."""
    figures = number_columns("latency us", "regimes from bytes", "GB/s of each")
    cells = (
        (
            *values,
            f"{1e6 * curve.latency:.1f}",
            " ".join(show_bytes(knee) for knee in (0, *curve.knees)),
            " ".join(f"{1e-9 / slope:.2f}" if slope else "-" for slope in curve.slopes),
        )
        for values, curve in model.curves.items()
    )
    title = "time = latency + bytes / bandwidth, by regime"
    show_table(out, (*key, *figures), cells, title=title)
