"""What a call has found, in few files that are whole at any time.

FOLDER gets ``CALL.log``, ``CALL.tar.gz`` and ``summary.md``: few and small, because results travel
by what carries few files of 16 MiB. The archive is made anew every few seconds, beside the old one
and then in its place. All rows are in it with texts that are cut; whole logs as far as they fit.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from first_gpu.supervise import Row

LARGEST_ARCHIVE = 16 * 2**20
_HEADER = 1024  # bytes of a file in an archive beside its contents
_EVERY = 15.0  # seconds
_COLUMNS = ("task", "item", "outcome", "seconds", "error")


class Results:
    """The rows of one call.

    Args:
        call: its name.
        folder: for what is handed on.
        work: for all files of the call; it is kept, and other calls look into it.
    """

    def __init__(self, call: str, folder: Path, work: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (work / call).mkdir(parents=True, exist_ok=True)
        self.call, self.folder, self.work = call, folder, work / call
        self.rows: dict[tuple[str, str], Row] = {}
        self.steps: list[str] = []
        self._lines = (self.work / "rows.jsonl").open("w", encoding="utf-8")
        self._log = (folder / f"{call}.log").open("w", encoding="utf-8")
        self._packed = 0.0
        self._changed = True

    def say(self, line: str) -> None:
        """Write a line to the log, and show it."""
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()

    def step(self, line: str) -> None:
        """Say what a step of the call has given; the summary has it too."""
        self.steps.append(line)
        (self.work / "steps.json").write_text(json.dumps(self.steps))
        self._changed = True
        self.say(line)

    def add(self, row: Row) -> None:
        """Keep a row, in place of an earlier one of the same item."""
        self.rows[row["task"], row["item"]] = row
        self._lines.write(json.dumps(row) + "\n")
        self._lines.flush()
        self._changed = True
        if row["outcome"] in ("failed", "crashed"):
            launch = row.get("launch") or {}
            where = f" in {launch['kernel']} {launch['grid']}" if launch else ""
            self.say(f"{row['outcome']}: {row['item']}: {row.get('error', '')}{where}")

    def count(self, outcome: str) -> int:
        """Return how many rows have an outcome."""
        return sum(row["outcome"] == outcome for row in self.rows.values())

    def tick(self) -> None:
        """Write the archive if there is something new and the last one is some seconds old."""
        if self._changed and time.monotonic() - self._packed > _EVERY:
            self.pack()

    def pack(self) -> None:
        """Write the summary and the archive."""
        self._changed = False
        rows = list(self.rows.values())
        (self.work / "rows.csv").write_text(_table(rows))
        page = summary(self.work.parent)
        _replace(self.folder / "summary.md", page.encode())
        (self.work / "summary.md").write_text(page)
        first = ["summary.md", "rows.csv", "rows.jsonl", "figures.csv"]
        tables = sorted(self.work.glob("*.json"), key=lambda path: path.stat().st_size)
        essential = [*(self.work / name for name in first), *tables]
        others = sorted(
            (path for path in self.work.rglob("*.log") if path.stat().st_size),
            key=lambda path: path.stat().st_size,
        )
        files = fitting([path for path in essential if path.exists()], others)
        _replace(self.folder / f"{self.call}.tar.gz", _archive(files, self.work))
        self._packed = time.monotonic()


def fitting(
    first: Sequence[Path], others: Sequence[Path], limit: int = LARGEST_ARCHIVE
) -> list[Path]:
    """Return the files that an archive of at most ``limit`` bytes has room for.

    Args:
        first: come first.
        others: come as long as they fit, in this order.
        limit: bytes of the archive.
    """
    chosen, size = [], 0
    for path in [*first, *others]:
        packed = len(zlib.compress(path.read_bytes(), 6)) + _HEADER
        if size + packed <= limit:
            chosen.append(path)
            size += packed
    return chosen


def _archive(files: Iterable[Path], root: Path) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz", compresslevel=6) as archive:
        for path in files:
            archive.add(path, arcname=str(path.relative_to(root)))
    return memory.getvalue()


def _replace(path: Path, contents: bytes) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(contents)
    os.replace(beside, path)


def _table(rows: Iterable[Row]) -> str:
    memory = io.StringIO()
    writer = csv.DictWriter(memory, [*_COLUMNS, "kernel"], extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        writer.writerow({**row, "kernel": (row.get("launch") or {}).get("kernel", "")})
    return memory.getvalue()


def read_rows(work: Path) -> list[Row]:
    """Return the rows of a call, the last of each item."""
    path = work / "rows.jsonl"
    rows: dict[tuple[str, str], Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a call that was killed while it wrote
            continue
        rows[row["task"], row["item"]] = row
    return list(rows.values())


def summary(work: Path) -> str:
    """Return one page about all calls so far."""
    parts = ["# The first hour on a GPU", ""]
    for call in ("test", "figures"):
        folder = work / call
        if not (folder / "steps.json").exists():
            continue
        parts += [f"## {call}", ""]
        parts += [f"* {line}" for line in json.loads((folder / "steps.json").read_text())]
        parts += [""]
        rows = read_rows(folder)
        if call == "figures":
            parts += _figures(folder)
        else:
            parts += _outcomes(rows)
        parts += _failures(rows)
    return "\n".join(parts) + "\n"


def _outcomes(rows: Sequence[Row]) -> list[str]:
    kinds = ("passed", "failed", "crashed", "not run", "skipped")
    tasks = sorted({row["task"] for row in rows})
    lines = ["| | " + " | ".join(kinds) + " |", "|" + "---|" * 6]
    perfect = 0
    for task in tasks:
        counts = [sum(r["outcome"] == kind for r in rows if r["task"] == task) for kind in kinds]
        if any(counts[1:4]):
            lines.append(f"| {task} | " + " | ".join(map(str, counts)) + " |")
        else:
            perfect += 1
    total = [sum(row["outcome"] == kind for row in rows) for kind in kinds]
    lines.append(f"| {perfect} without a failure |" + " |" * 5)
    return [*lines, "| all | " + " | ".join(map(str, total)) + " |", ""]


def _failures(rows: Sequence[Row], most: int = 30) -> list[str]:
    """Return lines about what failed; those of one task with one reason are one."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["outcome"] in ("failed", "crashed"):
            groups.setdefault((row["task"], row.get("error", "")[:200]), []).append(row)
    lines = []
    for (task, error), alike in list(groups.items())[:most]:
        times = f" ({len(alike)} times)" if len(alike) > 1 else ""
        lines.append(f"* {task}{times}: {error}; {alike[0]['item']}{_launch_words(alike[0])}")
    if len(groups) > most:
        lines.append(f"* {len(groups) - most} more reasons are in rows.csv")
    return [*lines, ""] if lines else []


def _launch_words(row: Row) -> str:
    launch = row.get("launch")
    if not launch:
        return ""
    words = {**launch["constexprs"], **launch["options"], **launch["arguments"]}
    told = ", ".join(f"{name} {value}" for name, value in words.items())
    return f"; last launch {launch['kernel']}, grid {launch['grid']}: {told[:600]}"


def _figures(folder: Path) -> list[str]:
    path = folder / "figures.json"
    if not path.exists():
        return []
    columns = ("figure", "direction", "ours", "baseline", "ratio", "rate", "of_limit", "of_mark")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in json.loads(path.read_text()):
        lines.append("| " + " | ".join(_cell(row, name) for name in columns) + " |")
    return [*lines, ""]


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if name in ("ours", "baseline"):
        us = row.get(f"{name}_us")
        word = row.get("rival", "") if name == "baseline" else ""
        return f"{us:.1f} us {word}".strip() if us is not None else ""
    if name == "rate":
        if row.get("tflop_per_s"):
            return f"{row['tflop_per_s']:.0f} TFLOP/s"
        return f"{row['gb_per_s']:.0f} GB/s" if row.get("gb_per_s") else ""
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)
