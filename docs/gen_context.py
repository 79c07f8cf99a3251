"""Writes docs/context_parallel.svg: who computes which scores, in each layout, and what moves.

    python docs/gen_context.py

Source: the plan by which ``ring_attention`` computes and sends (``fusedops/parallel/context``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fusedops.parallel.context import plan
from fusedops.parallel.context.layout import SequenceLayout, layout_of, order
from fusedops.parallel.context.plan import AttentionPattern

PICTURE = Path(__file__).resolve().parent / "context_parallel.svg"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
RANKS, LENGTH, CELL, LEFT, TOP, GAP = len(COLOURS), 16, 13, 24, 92, 44
SIDE = LENGTH * CELL
CAUSAL = AttentionPattern(-1, 0)
PANELS = (
    ("contiguous", "one document", None),
    ("zigzag", "one document", None),
    ("document", "two documents", (0, 6, 16)),
)


def main() -> None:
    PICTURE.write_text(picture())


def picture() -> str:
    """Return the SVG: a square of scores for each layout, and the sums below it."""
    width, height = LEFT + len(PANELS) * (SIDE + GAP), TOP + SIDE + 64
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Causal scores by rank in three layouts" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for index, (balance, words, ends) in enumerate(PANELS):
        layout = layout_of("picture", LENGTH, RANKS, balance, ends)
        lines += _panel(LEFT + index * (SIDE + GAP), f"{balance}, {words}", layout)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    yield from _text(LEFT, 18, "a row is a query, a column is a key, a colour is the query's rank:")
    for rank, colour in enumerate(COLOURS):
        x = LEFT + 372 + 64 * rank
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>'
        yield from _text(x + 16, 18, f"rank {rank}")
    yield from _text(LEFT, 38, "full colour: keys of its own; light: keys that another rank sends")


def _panel(x: int, title: str, layout: SequenceLayout) -> Iterator[str]:
    """Yield one square with the ranks of its tokens above and beside it."""
    yield from _text(x, TOP - 24, title, bold=True)
    share = LENGTH // RANKS
    places = order(layout, torch.device("cpu")).view(RANKS, share).tolist()
    for rank, mine in enumerate(places):
        for place in mine:
            at = CELL * place
            yield _square(x + at, TOP - 15, CELL - 2, 8, COLOURS[rank])
            yield _square(x - 15, TOP + at, 8, CELL - 2, COLOURS[rank])
    scores, moved = [0] * RANKS, [0] * RANKS
    for rank in range(RANKS):
        for source in range(RANKS):
            step = plan.step(layout, CAUSAL, rank, source)
            scores[rank] += step.scores
            moved[rank] += step.tokens * (rank != source)
            keys = [place for each in step.columns for place in places[source][slice(*each)]]
            for block in (block for call in step.calls for block in call.blocks):
                for row in range(*block.rows):
                    last = block.columns[1]
                    if block.right >= 0:
                        last = block.columns[0] + row - block.rows[0] + block.right + 1
                    for column in range(block.columns[0], last):
                        cell = x + CELL * keys[column], TOP + CELL * places[rank][row]
                        fade = "" if rank == source else ' fill-opacity="0.45"'
                        yield _square(*cell, CELL - 2, CELL - 2, COLOURS[rank], fade)
    yield from _sums(x, TOP + SIDE + 22, "scores", scores)
    yield from _sums(x, TOP + SIDE + 42, "keys that come", moved)


def _sums(x: int, y: int, name: str, values: list[int]) -> Iterator[str]:
    yield from _text(x, y, name)
    for rank, value in enumerate(values):
        yield from _text(x + 100 + 28 * rank, y, str(value), colour=COLOURS[rank], bold=True)


def _square(x: int, y: int, width: int, height: int, colour: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"{more}/>'


def _text(
    x: int, y: int, words: str, *, colour: str = "#222222", bold: bool = False
) -> Iterator[str]:
    weight = ' font-weight="bold"' if bold else ""
    yield f'<text x="{x}" y="{y}" fill="{colour}"{weight}>{words}</text>'


if __name__ == "__main__":
    main()
