"""The measurements of ops and whole models over time, in ``docs/reports/benchmark_history.csv``.

``bench/results`` has the newest record of each op and model; whoever measures again replaces it.
This file keeps one row per measurement: it needs no history of git, which a shallow clone lacks.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILE = ROOT / "docs" / "reports" / "benchmark_history.csv"


@dataclass(frozen=True, order=True)
class Measurement:
    """One op or model of one dtype on one device; ratios and shares are text with 3 digits."""

    device: str
    kind: str  # "op" or "model"
    name: str
    case: str
    dtype: str
    direction: str
    created: str  # ISO time
    commit: str  # 12 digits; "+": with changes that were not committed
    speedup: str  # times faster than eager, median
    low: str  # its quartiles
    high: str
    compiled: str  # the same of torch.compile; empty where it was not measured
    limit_share: str  # of the machine's limit: least time over median time; may be empty
    torch: str

    @property
    def subject(self) -> tuple[str, ...]:
        """What was measured: equal for measurements that replace each other."""
        return self.device, self.kind, self.name, self.case, self.dtype, self.direction

    @property
    def day(self) -> str:
        """The date of ``created``."""
        return self.created[:10]


def read() -> list[Measurement]:
    """Return the rows of the file, none where there is no file."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        return [Measurement(**row) for row in csv.DictReader(file)]


def write(measurements: Iterable[Measurement]) -> None:
    """Write the file, in the order of what was measured and then of time."""
    names = [field.name for field in fields(Measurement)]
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) for each in sorted(measurements))


def merged(old: Iterable[Measurement], new: Iterable[Measurement]) -> list[Measurement]:
    """Return all measurements; of one subject and time the new one counts."""
    by_key = {(*each.subject, each.created): each for each in (*old, *new)}
    return sorted(by_key.values(), key=astuple)


def current(headlines: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield what the records in ``bench/results`` have; ``headlines``: the case of each op."""
    for path in sorted(RESULTS.glob("*/*")):
        yield from parsed(path.name, path.read_text(), headlines)


def committed(headlines: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield what any committed record had, the oldest commit first. Needs the history of git."""
    folder = RESULTS.relative_to(ROOT).as_posix()
    for commit in reversed(_git("log", "--format=%H", "--", folder).split()):
        changed = _git("show", "--name-only", "--diff-filter=AM", "--format=", commit, "--", folder)
        for name in changed.splitlines():
            yield from parsed(Path(name).name, _git("show", f"{commit}:{name}"), headlines)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def parsed(file: str, text: str, headlines: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield the measurements of a record; none of files of another kind."""
    name = file.partition("-")[0]
    if file.startswith("models-") and file.endswith(".json"):
        yield from _models(json.loads(text))
    elif file.endswith(".csv") and name in headlines:
        rows = [row for row in csv.DictReader(io.StringIO(text)) if row["case"] == headlines[name]]
        directions = {row["direction"] for row in rows}
        direction = "both" if "both" in directions else "forward"
        yield from _pairs(
            "op", [row for row in rows if row["direction"] == direction], lambda row: row
        )


def _models(record: dict) -> Iterator[Measurement]:
    git = record.get("git") or {}
    commit = (git.get("commit") or "")[:12] + ("+" if git.get("changed") else "")
    shared = {
        "device": record["machine"]["slug"],
        "torch": record["versions"]["torch"],
        "commit": commit,
        "created": record["created"],
    }
    yield from _pairs("model", record["rows"], lambda row: {**row, **shared})


def _pairs(kind, rows, complete) -> Iterator[Measurement]:  # type: ignore[no-untyped-def]
    """Yield a measurement per trusted row of ours, with that of ``torch.compile``."""
    trusted = [complete(row) for row in rows if str(row["trusted"]) == "True"]
    compiled = {
        (row["case"], row["dtype"], row["direction"]): row["speedup"]
        for row in trusted
        if row["variant"] == "compile"
    }
    for row in trusted:
        if row["variant"] == "fusedops" and row["speedup"]:
            yield Measurement(
                device=row["device"],
                kind=kind,
                name=row["op"],
                case=row["case"],
                dtype=row["dtype"],
                direction=row["direction"],
                created=row["created"],
                commit=row["commit"],
                speedup=_digits(row["speedup"]),
                low=_digits(row["speedup_q1"]),
                high=_digits(row["speedup_q3"]),
                compiled=_digits(compiled.get((row["case"], row["dtype"], row["direction"]))),
                limit_share=_digits(row["limit_share"]),
                torch=row["torch"],
            )


def _digits(value: object) -> str:
    return f"{float(str(value)):.3f}" if value not in (None, "") else ""
