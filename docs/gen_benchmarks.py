"""Writes the tables and pictures of docs/benchmarks.md, and adds new measurements to their history.

python docs/gen_benchmarks.py         # from bench/results and docs/reports
python docs/gen_benchmarks.py --git   # also every record that was ever committed
"""

from __future__ import annotations

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

from fusedops.bench import svg  # noqa: E402
from fusedops.specs import all_specs  # noqa: E402

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
    return svg.dots(f"Times faster than eager: {kind}s on {device}", lines)


if __name__ == "__main__":
    main(sys.argv[1:])
