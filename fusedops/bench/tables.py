"""Tables of measured figures: rows from and to CSV, and how far two orders agree."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fusedops.launch.config_table import InputError


def load_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file.

    Raises:
        InputError: it cannot be read, or has no rows.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [
                {key: value or "" for key, value in row.items() if key}
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; check the path"
        ) from None
    if not rows:
        raise InputError(f"{path} has no rows")
    return rows


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Return rows as the text of a CSV file; cells of other columns are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def kendall_tau(pairs: Iterable[tuple[float, float]]) -> float:
    """Return Kendall's rank correlation (tau-b) of pairs; 1.0 where all of one side are equal."""
    values = list(pairs)
    signs = [
        ((x > u) - (x < u), (y > v) - (y < v))
        for index, (x, y) in enumerate(values)
        for u, v in values[:index]
    ]
    scale = math.sqrt(sum(a * a for a, _ in signs) * sum(b * b for _, b in signs))
    return sum(a * b for a, b in signs) / scale if scale else 1.0
