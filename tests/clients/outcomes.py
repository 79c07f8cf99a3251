"""Writes down what each test found, for docs/gen_trainers.py: one row per trainer, mode, version.

A row that is tested again is replaced. Two workers may write at once, hence the lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from harness import Trial


@dataclass
class Row:
    """What a test says about its run; see ``harness.Outcome``."""

    model: str = "Llama"
    fused: dict[str, int] = field(default_factory=dict)
    aside: list[str] = field(default_factory=list)


class Table:
    """Where the rows of a test go."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trainers.json"

    def compare(
        self, trial: Trial, package: str, mode: str, processes: int = 1, gap: str = ""
    ) -> None:
        """Make a comparison and write its row; ``gap`` says why it cannot succeed yet."""
        with self.row(package, mode, processes, gap) as row:
            row.model = trial.family
            found = trial.compare(processes)
            row.fused, row.aside = found.fused, found.aside

    @contextmanager
    def row(self, package: str, mode: str, processes: int = 1, gap: str = "") -> Iterator[Row]:
        """Write a row: that what runs inside raises nothing, or why it does."""
        row, note = Row(), ""
        try:
            yield row
        except BaseException as error:
            note = gap or _last_line(error)
            raise
        finally:
            key = {"package": package, "mode": mode, "transformers": transformers.__version__}
            found = {
                "version": version(package),
                "torch": torch.__version__.partition("+")[0],
                "processes": processes,
                "model": row.model,
                "same": not note,
                "note": note,
                "fused": dict(sorted(row.fused.items())),
                "aside": row.aside,
            }
            self._write(key, found)

    def _write(self, key: dict[str, Any], found: dict[str, Any]) -> None:
        self._path.parent.mkdir(exist_ok=True)
        with FileLock(f"{self._path}.lock"):
            rows = json.loads(self._path.read_text()) if self._path.exists() else []
            rows = [row for row in rows if {name: row[name] for name in key} != key]
            rows.append(key | found)
            rows.sort(key=lambda row: (row["package"], row["mode"], row["transformers"]))
            self._path.write_text(json.dumps(rows, indent=1) + "\n")


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
