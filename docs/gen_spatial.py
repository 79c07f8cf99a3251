"""Writes docs/spatial.svg: the parts of an image on 2 x 2 ranks, their halos, and what is sent.

    python docs/gen_spatial.py

Source: the arithmetic by which convolutions compute and send (``fusedops/parallel/spatial``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fusedops.parallel.spatial.convolution import ConvDim
from fusedops.parallel.spatial.partition import Axis, Cut, balanced

PICTURE = Path(__file__).resolve().parent / "spatial.svg"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
HEIGHT, WIDTH, CELL, LEFT, TOP = 13, 16, 14, 24, 64
CONV = ConvDim(kernel=5, stride=1, padding=2, dilation=1)


def spans(size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the rows of a rank of two, and those that it needs."""
    bounds = balanced(size, 2)
    group: Any = SimpleNamespace()
    cut = Cut(Axis("y", group, rank, 2), bounds, bounds)
    first, last = CONV.inputs(cut.own, size)
    return cut.own, (max(first, 0), min(last, size))


def panel(left: float, step: str) -> Iterator[str]:
    """Yield the parts, and what rank 0 receives in one of the two exchanges."""
    yield f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{step}</text>'
    for rank in range(4):
        (y0, y1), _ = spans(HEIGHT, rank // 2)
        (x0, x1), _ = spans(WIDTH, rank % 2)
        x, y = left + x0 * CELL, TOP + y0 * CELL
        size = f'width="{(x1 - x0) * CELL - 2}" height="{(y1 - y0) * CELL - 2}"'
        yield f'<rect x="{x}" y="{y}" {size} fill="{COLOURS[rank]}" opacity="0.45"/>'
        yield f'<text x="{x + 6}" y="{y + 16}">rank {rank}</text>'
    (y0, y1), (_, needed_y) = spans(HEIGHT, 0)
    (x0, x1), (_, needed_x) = spans(WIDTH, 0)
    yield rect(left, x0, y1, x1, needed_y, COLOURS[2], first=True)
    if step.startswith("2"):
        yield rect(left, x1, y0, needed_x, needed_y, COLOURS[1], first=False)


def rect(left: float, x0: int, y0: int, x1: int, y1: int, colour: str, *, first: bool) -> str:
    """Return received rows: hatched by their border."""
    place = f'x="{left + x0 * CELL}" y="{TOP + y0 * CELL}"'
    size = f'width="{(x1 - x0) * CELL - 2}" height="{(y1 - y0) * CELL - 2}"'
    dash = "" if first else ' stroke-dasharray="4 2"'
    return f'<rect {place} {size} fill="{colour}" stroke="#222" stroke-width="2"{dash}/>'


def picture() -> str:
    """Return the drawing."""
    gap = WIDTH * CELL + 60
    width, height = LEFT + 2 * gap, TOP + HEIGHT * CELL + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">What rank 0 of 2 x 2 receives for a 5 x 5 '
        f"convolution of {HEIGHT} x {WIDTH} pixels</text>",
        *panel(LEFT, "1. along y: rows of rank 2"),
        *panel(LEFT + gap, "2. along x: columns of rank 1, with its halo rows"),
        f'<text x="{LEFT}" y="{height - 14}">The corner of rank 3 comes with the columns of '
        "rank 1, which received it in the first exchange.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
