"""The record of a measurement: its rows, and how it goes to JSON and CSV and comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fusedops.bench.tables import csv_text
from fusedops.terminal import files

FORMAT = 1
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
DIRECTIONS = (FORWARD, BACKWARD, BOTH)
EAGER, COMPILE, AUTOMATIC = "eager", "compile", "fusedops"


def is_ours(variant: str) -> bool:
    """Return whether fusedops computes what the variant of this name does."""
    return variant.split(":")[0] == AUTOMATIC


@dataclass(frozen=True)
class BenchRow:
    """One contender at one case in one direction. ``None``: not measured, or without meaning."""

    op: str  # the op's name, or the family of a whole model
    case: str  # the size, as the spec labels it
    dtype: str  # ``"float32"`` and so on
    # ``"forward"`` (recording for the backward), ``"backward"`` or ``"both"``; of a whole model
    # ``"training"``, ``"forward"`` (no gradient) or ``"decoding"``
    direction: str
    variant: str  # ``"eager"``, ``"compile"``, ``"fusedops"``, ``"fusedops:<backend>"`` or a peer
    backend: str  # the backend that really ran, empty where it is not fusedops
    allocator: str  # ``"tuned"`` or ``"system"``, the same for all rows of a record
    speedup: float  # time of eager divided by the row's, median of the rounds' ratios
    speedup_q1: float  # lower quartile of those ratios
    speedup_q3: float  # upper quartile
    median_us: float  # median time of one call
    q1_us: float  # lower quartile
    q3_us: float  # upper quartile
    samples: int  # how many samples count
    discarded: int  # how many were disturbed and do not count
    trusted: bool  # whether enough samples of the row, and of eager, were undisturbed
    gb_per_s: float  # least bytes to move, divided by the median time
    tflop_per_s: float | None  # operations of the matrix products, divided by the median time
    limit_share: float  # the machine's least time for that work, divided by the median time
    # whether memory is the limit and those bytes are below twice the last cache, so that part of
    # them stays there: ``limit_share`` may then exceed 1
    in_cache: bool
    # least time of the call on a tiny input: what the host pays whatever the size
    host_us: float | None
    peak_bytes: int | None  # peak memory above what was allocated before the call
    error_max_ulps: float | None  # largest error against float64, in units of the last place
    error_mean_ulps: float | None  # mean error
    note: str = ""  # why a figure is missing
    rival: str = ""  # of a row of fusedops, the fastest of those that are not ours
    # time of that rival divided by the row's, median of the rounds' ratios
    lead: float | None = None
    lead_q1: float | None = None  # lower quartile of those ratios
    lead_q3: float | None = None  # upper quartile

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What identifies the row in its record."""
        return (self.op, self.case, self.dtype, self.direction, self.variant)

    @property
    def ours(self) -> bool:
        """Whether fusedops computed it."""
        return is_ours(self.variant)


@dataclass(frozen=True)
class BenchRecord:
    """A whole measurement."""

    machine: dict[str, Any]  # ``machine.describe``
    versions: dict[str, str]  # of everything that ran
    git: dict[str, Any]  # commit and whether the tree had changes; empty outside of a source tree
    settings: dict[str, Any]  # how it was measured
    limits: dict[str, Any]  # the machine's measured limits
    rows: tuple[BenchRow, ...]  # the figures
    notes: tuple[str, ...]  # what could not be measured and why
    created: str  # UTC time, ISO 8601

    def parts(self) -> dict[tuple[str, str], BenchRecord]:
        """Return the records of each op, or family, in each dtype."""
        rows: dict[tuple[str, str], list[BenchRow]] = {}
        for row in self.rows:
            rows.setdefault((row.op, row.dtype), []).append(row)
        return {key: replace(self, rows=tuple(part)) for key, part in rows.items()}

    def cases(self) -> list[dict[str, BenchRow]]:
        """Return the rows of each op, size, direction and dtype, by contender."""
        cases: dict[tuple[str, ...], dict[str, BenchRow]] = {}
        for row in self.rows:
            cases.setdefault(row.key[:-1], {})[row.variant] = row
        return list(cases.values())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as rows have it: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def save_json(path: str | os.PathLike[str], record: BenchRecord) -> None:
    """Write a record, all or nothing."""
    files.write_json(path, {"format": FORMAT, **asdict(record)})


def load_json(path: str | os.PathLike[str]) -> BenchRecord:
    """Return the record of a file.

    Raises:
        UserError: when the file cannot be read or does not hold a record of this format.
    """
    data = files.read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise files.UserError(f"{path} is no record of `fusedops bench --json`")
    if data.get("format") != FORMAT:
        number = data.get("format")
        raise files.UserError(
            f"{path} has format {number!r}, this version reads format {FORMAT}: measure again"
        )
    try:
        rows = tuple(BenchRow(**row) for row in data["rows"])
        values = {field.name: data[field.name] for field in fields(BenchRecord)}
        return BenchRecord(**values | {"rows": rows, "notes": tuple(data["notes"])})
    except (TypeError, KeyError) as error:
        raise files.UserError(f"{path} is a damaged record: {error}; measure again") from None


def save_csv(path: str | os.PathLike[str], record: BenchRecord) -> None:
    """Write the rows as CSV, each with where, when and with what it was measured."""
    files.write_text(path, to_csv(record))


def to_csv(record: BenchRecord) -> str:
    """Return the rows as CSV."""
    common = {
        "device": record.machine["slug"],
        "device_name": record.machine["name"],
        "threads": record.machine["threads"],
        "torch": record.versions["torch"],
        "fusedops": record.versions.get("fusedops", "source tree"),
        "triton": record.versions.get("triton", ""),
        "commit": record.git.get("commit", "")[:12] + "+" * bool(record.git.get("changed")),
        "created": record.created,
    }
    # Four significant digits say more than seventeen.
    rows = [
        {key: f"{cell:.4g}" if isinstance(cell, float) else cell for key, cell in values.items()}
        | common
        for values in map(asdict, record.rows)
    ]
    return csv_text(rows, [*(field.name for field in fields(BenchRow)), *common])


def save_parts(
    folder: str | os.PathLike[str],
    record: BenchRecord,
    name: str,
    save: Callable[[Path, BenchRecord], None],
) -> list[Path]:
    """Write a file for each op, or family, and dtype into ``folder/<device>``; return them.

    ``name`` has places for both: ``"models-{}-{}.json"``; ``save`` writes one.
    """
    target = files.make_folder(Path(folder) / record.machine["slug"])
    written = []
    for key, part in record.parts().items():
        written.append(target / name.format(*key))
        save(written[-1], part)
    return written
