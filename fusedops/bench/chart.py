"""A record as one picture: times faster than eager, of ours and of torch.compile."""

from __future__ import annotations

import os

from fusedops.bench import svg
from fusedops.bench.contenders import COMPILE
from fusedops.bench.results import BenchRecord
from fusedops.terminal import files


def draw(record: BenchRecord) -> str:
    """Return an SVG with a bar per row of ours: times faster than eager."""
    lines = [
        svg.Bar(
            f"{ours.op} {ours.direction} {ours.case} {ours.dtype}",
            ours.speedup if ours.trusted else None,
            case[COMPILE].speedup if COMPILE in case and case[COMPILE].trusted else None,
        )
        for case in record.cases()
        if (ours := case.get("fusedops")) is not None
    ]
    return svg.bars(f"Times faster than eager ({record.machine['slug']})", lines)


def save(path: str | os.PathLike[str], record: BenchRecord) -> None:
    """Write the picture, all or nothing."""
    files.write_text(path, draw(record))
