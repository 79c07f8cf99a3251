"""Where the time of `make test` goes: the slowest tests and the total of each folder.

    python tools/durations.py out/tests.xml out/interpreter.xml [--write]

It reads the JUnit files that `make test` leaves behind. With --write (`make durations`) the tables
go to docs/dev/test_durations.md. Times are those of a worker, set-up and teardown included, so that
the run itself takes the total divided by the number of workers.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from fusedops.bench.machine import machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dev" / "test_durations.md"
SLOWEST = 40


class Duration(NamedTuple):
    """What one test took."""

    seconds: float
    folder: str
    file: str
    test: str


def read(paths: list[Path]) -> list[Duration]:
    """Return what each test of these JUnit files took, the slowest first."""
    durations = []
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            parts = (case.get("classname") or "").split(".")
            if parts[0] == "tests":
                parts = parts[1:]
            if not parts or not case.get("name") or not parts[0]:
                continue  # a file that was skipped while it was collected
            folder = parts[0] if len(parts) > 1 else "."
            seconds = float(case.get("time", 0))
            file = "/".join(parts) + ".py"
            durations.append(Duration(seconds, folder, file, case.get("name", "")))
    return sorted(durations, reverse=True)


def tables(durations: list[Duration]) -> str:
    """Return the two tables in Markdown."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for duration in durations:
        seconds[duration.folder].append(duration.seconds)
    lines = ["| folder | tests | seconds |", "|---|---:|---:|"]
    for folder in sorted(seconds, key=lambda name: -sum(seconds[name])):
        lines.append(f"| {folder} | {len(seconds[folder])} | {sum(seconds[folder]):.0f} |")
    total = sum(duration.seconds for duration in durations)
    lines += [f"| all | {len(durations)} | {total:.0f} |", ""]
    lines += ["| seconds | file | test |", "|---:|---|---|"]
    for duration in durations[:SLOWEST]:
        test = duration.test.replace("|", "\\|")
        lines.append(f"| {duration.seconds:.1f} | {duration.file} | `{test}` |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--note", default="", help="what else the page says, e.g. of other load")
    options = parser.parse_args()
    absent = [path for path in options.files if not path.exists()]
    if absent:
        print(f"no such file: {', '.join(map(str, absent))}; run make test first", file=sys.stderr)
        return 2
    text = tables(read(options.files))
    print(text)
    if options.write:
        sources = ", ".join(path.name for path in options.files)
        note = f" {options.note}" if options.note else ""
        PAGE.write_text(
            "# Durations of the tests\n\n"
            "Written by `make durations` from the last `make test`; never edited by hand.\n"
            f"Seconds of one worker on {machine(torch.device('cpu')).name}, from "
            f"{sources}.{note}\n\n"
            f"{text}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
