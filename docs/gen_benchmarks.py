"""Writes the tables and pictures of docs/benchmarks.md, and adds new measurements to their history.

python docs/gen_benchmarks.py         # from bench/results and docs/reports
python docs/gen_benchmarks.py --git   # also every record that was ever committed
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import benchmark_history as history  # noqa: E402
from benchmark_history import Measurement  # noqa: E402
from blocks import replaced  # noqa: E402
from results import share_of_limit  # noqa: E402

from fusedops.specs import all_specs  # noqa: E402
from fusedops.terminal.svg import INK, document, element, text  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
# Earlier measurements that a row shows.
_EARLIER = 3
# From docs/: the page of an op, and of whole models.
PAGES = {"op": "ops/{}.md", "model": "bench_models.md"}


def main(arguments: Sequence[str]) -> None:
    if set(arguments) - {"--git"}:
        raise SystemExit("usage: python docs/gen_benchmarks.py [--git]")
    headlines = {
        name: next((case.label for case in spec.bench_cases if case.headline), "")
        for name, spec in all_specs().items()
    }
    rows = history.read()
    if arguments:
        rows = history.merged(rows, history.committed(headlines))
    rows = history.merged(rows, history.current(headlines))
    history.write(rows)
    devices = {device: list(group) for device, group in groupby(rows, lambda row: row.device)}
    sections = "\n".join(_section(*item) for item in devices.items())
    PAGE.write_text(replaced(PAGE.read_text(), "measurements", sections))
    for device, group in devices.items():
        for kind in PAGES:
            subjects = _subjects(group, kind)
            if subjects:
                _picture_path(device, kind).write_text(_picture(device, kind, subjects))
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(rows)} measurements of {len(devices)} devices")


def _subjects(rows: Sequence[Measurement], kind: str) -> list[list[Measurement]]:
    """Return the measurements of each op or model, the newest last."""
    chosen = (row for row in rows if row.kind == kind)
    return [list(group) for _, group in groupby(chosen, lambda row: row.subject)]


def _section(device: str, rows: Sequence[Measurement]) -> str:
    newest = max(rows, key=lambda row: row.created)
    parts = [f"## {device}", "", f"torch {newest.torch}, last measured on {newest.day}.", ""]
    for kind, title in (("op", "Ops"), ("model", "Whole models")):
        subjects = _subjects(rows, kind)
        if not subjects:
            continue
        picture = _picture_path(device, kind).name
        parts += [
            f"### {title} on {device}",
            "",
            f"![{title} on {device}: times faster than eager]({picture})",
            "",
            "| | size | dtype | x eager (compile) | quartiles | of limit | measured | before |",
            "|---|---|---|---:|---:|---:|---|---|",
            *(_line(group) for group in subjects),
            "",
        ]
    return "\n".join(parts)


def _line(group: Sequence[Measurement]) -> str:
    *before, row = group
    page = PAGES[row.kind].format(row.name)
    mode = "" if row.direction == "both" else f" {row.direction}"
    compiled = f" ({float(row.compiled):.2f})" if row.compiled else ""
    share = share_of_limit(row.limit_share)
    earlier = ", ".join(f"{float(old.speedup):.2f} ({old.day[5:]})" for old in before[-_EARLIER:])
    cells = (
        f"[`{row.name}`]({page}){mode}",
        row.case,
        row.dtype,
        f"{float(row.speedup):.2f}{compiled}",
        f"{float(row.low):.2f}-{float(row.high):.2f}",
        share,
        f"{row.day}, `{row.commit}`" if row.commit else row.day,
        earlier,
    )
    return f"| {' | '.join(cells)} |"


def _picture_path(device: str, kind: str) -> Path:
    return ROOT / "docs" / f"benchmarks-{device}-{kind}s.svg"


def _picture(device: str, kind: str, subjects: Sequence[Sequence[Measurement]]) -> str:
    lines = []
    for group in subjects:
        row = group[-1]
        mode = "" if row.direction == "both" else f" {row.direction}"
        label = f"{row.name}{mode}, {row.dtype}"
        if row.kind == "model":  # of decoding there are two numbers of sequences
            label = f"{row.name}{mode} {row.case.split(', ')[-1]}, {row.dtype}"
        lines.append((label, [float(each.speedup) for each in group]))
    lines.sort(key=lambda line: (-line[1][-1], line[0]))
    return dots(f"Times faster than eager: {kind}s on {device}", lines)


_WIDTH, _RIGHT, _TOP, _STEP = 760, 60, 46, 16
_NEWEST, _BEFORE, _GRID, _ONE = "#1f6fb4", "#b9c2cb", "#e3e3e3", "#c0392b"


def dots(title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return the SVG of measurements of the same things over time, on a logarithmic axis.

    Args:
        title: of the picture.
        rows: labels, and the positive ratios of each from the oldest to the newest.
    """
    left = max(190, round(6.4 * max((len(label) for label, _ in rows), default=0)) + 16)
    values = [value for _, ratios in rows for value in ratios]
    height = _TOP + _STEP * len(rows) + 24
    low, high = math.log(min(0.8, *values)), math.log(max(1.25, *values) * 1.05)

    def place(value: float) -> float:
        return left + (math.log(value) - low) / (high - low) * (_WIDTH - left - _RIGHT)

    parts = []
    for tick in (0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100):
        if low <= math.log(tick) <= high:
            x, colour = place(tick), _ONE if tick == 1 else _GRID
            parts += [
                element("line", x1=x, y1=_TOP - 8, x2=x, y2=height - 18, stroke=colour),
                text(x, height - 5, f"{tick:g}", text_anchor="middle", fill=INK),
            ]
    for index, (label, ratios) in enumerate(rows):
        y = _TOP + _STEP * index
        *before, newest = map(place, ratios)
        parts += [
            text(left - 8, y + 4, label, text_anchor="end", fill=INK),
            *(element("circle", cx=x, cy=y, r=3, fill=_BEFORE) for x in before),
            element("circle", cx=newest, cy=y, r=4, fill=_NEWEST),
            text(newest + 8, y + 4, f"{ratios[-1]:.2f}", fill=INK),
        ]
    return document(_WIDTH, height, title, parts, font_size=11)


if __name__ == "__main__":
    main(sys.argv[1:])
