"""Writes docs/parallel.svg and the table of docs/parallel.md: what moves in a step of each mode.

    python docs/gen_parallel.py

Source: the communications that ``fusedops.parallel.comm.collectives`` records while a tiny model
makes a step on ranks that are threads of this process. The table stands between two markers; the
rest of the page is written by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Event
from fusedops.testing import threads

DOCS = Path(__file__).resolve().parent
PICTURE, PAGE = DOCS / "parallel.svg", DOCS / "parallel.md"
MARKERS = "<!-- made by docs/gen_parallel.py -->", "<!-- end -->"
MODES: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2},
    "dp 2, zero 1 or 2": {"dp": 2, "zero": 2},
    "dp 2, zero 3": {"dp": 2, "zero": 3},
    "tp 2": {"tp": 2},
    "tp 2, overlap_microbatches": {"tp": 2, "overlap_microbatches": True},
    "tp 2, sp": {"tp": 2, "sp": True, "overlap": False},
    "tp 2, sp, overlap": {"tp": 2, "sp": True},
    "cp 2, ring": {"cp": 2},
    "cp 2, all-to-all": {"cp": 2, "context": "all_to_all"},
    "dp 2, ep 2": {"dp": 2, "ep": 2},
}
COLOURS = {
    "all_reduce": "#4c78a8",
    "all_gather": "#54a24b",
    "reduce_scatter": "#f58518",
    "all_to_all": "#b279a2",
    "send_receive": "#e45756",
    "broadcast": "#9d755d",
}
SEQUENCES, TOKENS = 4, 32
LEFT, TOP, ROW, BOX, GAP = 150, 64, 46, 9, 2


@dataclass
class Step:
    """What the first rank sends in a second step: before the loss is known, and after."""

    forward: list[Event]
    backward: list[Event]


def main() -> None:
    steps = {name: _step(values) for name, values in MODES.items()}
    PICTURE.write_text(picture(steps))
    page = PAGE.read_text()
    begin, end = MARKERS
    table = f"{begin}\n{_table(steps)}\n{end}"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    PAGE.write_text(re.sub(pattern, lambda _: table, page, flags=re.DOTALL))


def _step(values: dict[str, Any]) -> Step:
    config = ParallelConfig(**values)
    ranks = config.sizes.ranks
    return threads.run(lambda rank: _recorded(config), ranks)[0]


def _recorded(config: ParallelConfig) -> Step:
    name = "tiny-llama" if config.ep == 1 else "tiny-mixtral"
    model = Transformer(preset(name), device="meta")
    run = parallelize(model, config, seed=0)
    text = torch.arange(SEQUENCES * (TOKENS + 1)).reshape(SEQUENCES, -1) % model.config.vocab_size
    shard = run.shard_batch(run.rows(text[:, :-1]), run.rows(text[:, 1:]))
    count = run.count(shard.labels)
    for _ in range(2):
        with collectives.recorded() as forward:
            output = model(*shard[:2], positions=shard.positions)
            loss = run.loss(output, count)
        with collectives.recorded() as backward:
            loss.backward()
    return Step(forward.calls, backward.calls)


def _table(steps: dict[str, Step]) -> str:
    lines = ["| mode | forward | backward | KiB sent |", "|---|---|---|---|"]
    for name, step in steps.items():
        sent = sum(each.bytes for each in step.forward + step.backward) / 1024
        parts = (_counts(step.forward), _counts(step.backward))
        lines.append(f"| {name} | {parts[0]} | {parts[1]} | {sent:.0f} |")
    return "\n".join(lines)


def _counts(events: list[Event]) -> str:
    found = Counter(event.kind.replace("_", "-") for event in events)
    return ", ".join(f"{count} {kind}" for kind, count in found.items()) or "-"


def picture(steps: dict[str, Step]) -> str:
    """Return the SVG: a line for each mode, a box for each communication in its order."""
    longest = max(len(each.forward) + len(each.backward) for each in steps.values())
    width = LEFT + (longest + 3) * (BOX + GAP) + 20
    height = TOP + ROW * len(steps) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Communications of a training step in each mode" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for index, (name, step) in enumerate(steps.items()):
        lines += _line(TOP + ROW * index, name, step)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = 10
    for kind, colour in COLOURS.items():
        if kind == "broadcast":
            continue
        yield f'<rect x="{x}" y="10" width="11" height="11" fill="{colour}"/>'
        yield _text(x + 15, 20, kind.replace("_", "-"))
        x += 110
    yield _text(10, 42, "left of the line: forward, right of it: backward; height: bytes sent")


def _line(y: int, name: str, step: Step) -> Iterator[str]:
    bottom = y + ROW - 10
    yield _text(10, bottom - 4, name)
    x = LEFT
    for events in (step.forward, step.backward):
        for event in events:
            tall = max(3.0, min(ROW - 14.0, 4.0 * (event.bytes / 1024) ** 0.5))
            yield (
                f'<rect x="{x}" y="{bottom - tall:.1f}" width="{BOX}" height="{tall:.1f}"'
                f' fill="{COLOURS[event.kind]}"><title>{event.kind} {event.label},'
                f" {event.bytes} bytes</title></rect>"
            )
            x += BOX + GAP
        if events is step.forward:
            yield (
                f'<line x1="{x + 3}" y1="{bottom - 30}" x2="{x + 3}" y2="{bottom + 3}"'
                ' stroke="#888"/>'
            )
            x += 10


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{text}</text>'


if __name__ == "__main__":
    main()
