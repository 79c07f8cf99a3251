"""Writes docs/microbatch_overlap.svg: the phases of both halves, and what overlaps them.

    python docs/gen_microbatch_overlap.py

Source: the events that ``fusedops.parallel.comm.collectives`` records while a tiny model makes a
step with ``overlap_microbatches=True`` on two ranks that are threads of this process. Columns
are phases in their order, not times: what stands side by side ran side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.parallel import microbatch_overlap
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import COMPUTE, ComputeSpan, Log
from fusedops.testing import threads

PICTURE = Path(__file__).resolve().parent / "microbatch_overlap.svg"
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2": ("tiny-gpt2", {"tp": 2}),
    "tp 2, sp": ("tiny-gpt2", {"tp": 2, "sp": True}),
    "dp 2, ep 2": ("tiny-mixtral", {"dp": 2, "ep": 2}),
}
LAYERS, SEQUENCES, TOKENS = 2, 4, 16
# What a turn is, by the words that its name begins with.
TURNS = {
    "norms": ("#c8c8c8", ("begin", "norm")),
    "query, key, value": ("#9ecae9", ("query",)),
    "attention": ("#4c78a8", ("attention",)),
    "feed-forward": ("#88d27a", ("feed-forward",)),
    "experts": ("#b279a2", ("experts", "shared")),
}
UNDER_WAY, WAITED_FOR = "#f58518", "#e45756"
LEFT, TOP, COLUMN, ROW, PANEL = 196, 66, 24, 15, 100


@dataclass
class Panel:
    """One direction of a step.

    Attributes:
        turns: number of the half, name.
        travels: number of the half, what it is, the turn that begins it, the turn that waits.
    """

    turns: list[tuple[int, str]] = field(default_factory=list)
    travels: list[tuple[int, str, int, int]] = field(default_factory=list)


# Of this thread, which is a rank: the end of the chain of marks.
_RANK = threading.local()


@contextmanager
def backward_marked() -> Iterator[None]:
    """Let phases of micro-batch overlap also mark their backward, between the two calls below.

    Each phase adds two scalars to a chain in the autograd graph, whose backwards run when the
    backward of the phase does.
    """
    with mock.patch.object(microbatch_overlap, "computing", _phase):
        yield


def begin_marks() -> None:
    """Begin the chain of marks of this rank, before a forward."""
    _RANK.link = torch.zeros((), requires_grad=True)


def end_marks(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, whose backward also runs the marks."""
    link, _RANK.link = _RANK.link, None
    return loss + 0.0 * link


@contextmanager
def _phase(label: str) -> Iterator[None]:
    backward = ComputeSpan(f"{label}, backward")
    is_marked = getattr(_RANK, "link", None) is not None
    if is_marked:
        _RANK.link = _Mark.apply(_RANK.link, backward, "end")
    with collectives.computing(label):
        yield
    if is_marked:
        _RANK.link = _Mark.apply(_RANK.link, backward, "start")


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, span: ComputeSpan, phase: str) -> torch.Tensor:
        ctx.span, ctx.phase = span, phase
        return link.view_as(link)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.span.mark(ctx.phase)
        return grads[0], None, None


def main() -> None:
    panels = {}
    for name, (model, values) in MODES.items():
        ranks = ParallelConfig(**values).sizes.ranks
        with backward_marked():
            steps = threads.run(lambda rank, m=model, v=values: _recorded(m, v), ranks)
        panels |= {f"{name}, {way}": _panel(log) for way, log in steps[0].items()}
    PICTURE.write_text(picture(panels))


def _recorded(name: str, values: dict[str, Any]) -> dict[str, Log]:
    whole = Transformer(replace(preset(name), num_layers=LAYERS), device="meta")
    run = parallelize(whole, ParallelConfig(**values, overlap_microbatches=True), seed=0)
    shape = SEQUENCES * run.data_ranks, TOKENS + 1
    text = torch.arange(shape[0] * shape[1]).reshape(shape) % whole.config.vocab_size
    shard = run.shard_batch(run.rows(text[:, :-1]), run.rows(text[:, 1:]))
    count = run.count(shard.labels)
    begin_marks()
    with collectives.recorded() as forward:
        loss = run.loss(whole(*shard[:2], positions=shard.positions), count)
    loss = end_marks(loss)
    with collectives.recorded() as backward:
        loss.backward()
    return {"forward": forward, "backward": backward}


def _panel(log: Log) -> Panel:
    panel, begun = Panel(), {}
    running = False
    for event in log.events:
        if event.kind == COMPUTE:
            running = event.phase == "start"
            if running:
                half, name = event.label.split(": ")
                panel.turns.append((int(half[-1]), name))
        elif running and event.phase == "start":
            begun[event.number] = panel.turns[-1][0], len(panel.turns) - 1
        elif event.number in begun and event.label not in ("expert metadata", "error vote"):
            half, first = begun[event.number]
            what = f"{event.kind} {event.label}".replace("_", "-").strip()
            panel.travels.append((half, what, first, len(panel.turns) - 1))
    return panel


def picture(panels: dict[str, Panel]) -> str:
    """Return the SVG: a panel for each direction of each mode."""
    width = LEFT + COLUMN * max(len(each.turns) for each in panels.values()) + 16
    height = TOP + PANEL * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Phases of two halves of a micro-batch, and overlapped communication"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for index, (name, panel) in enumerate(panels.items()):
        lines += _drawn(TOP + PANEL * index, name, panel)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = 10
    for name, (colour, _) in TURNS.items():
        yield _box(x, 10, 11, 11, colour, name)
        yield _text(x + 15, 20, name)
        x += 30 + 7 * len(name)
    x = 10
    for colour, name in ((UNDER_WAY, "under way"), (WAITED_FOR, "waited for: nothing beside it")):
        yield _box(x, 32, 11, 11, colour, name)
        yield _text(x + 15, 42, name)
        x += 110


def _drawn(y: int, name: str, panel: Panel) -> Iterator[str]:
    yield _text(10, y + 12, name)
    for half in (0, 1):
        top = y + half * (2 * ROW + 8)
        yield _text(146, top + 12, f"half {half + 1}")
        for column, (number, turn) in enumerate(panel.turns):
            if number == half:
                colour = _colour(turn)
                yield _box(LEFT + COLUMN * column + 1, top, COLUMN - 2, ROW, colour, turn)
        for number, what, first, last in panel.travels:
            if number == half:
                begin, end = LEFT + COLUMN * (first + 1), LEFT + COLUMN * last
                beside = end > begin
                x, wide = (begin + 2, end - begin - 4) if beside else (begin - 3, 6)
                colour = UNDER_WAY if beside else WAITED_FOR
                yield _box(x, top + ROW + 2, wide, ROW - 6, colour, what)


def _colour(turn: str) -> str:
    for colour, words in TURNS.values():
        if turn.startswith(words):
            return colour
    return "#f4f4f4"


def _box(x: float, y: float, wide: float, tall: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="{tall}" fill="{colour}">'
        f"<title>{title}</title></rect>"
    )


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{text}</text>'


if __name__ == "__main__":
    main()
