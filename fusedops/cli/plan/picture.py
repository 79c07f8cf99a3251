"""The picture of ``fusedops plan time --svg``: time and memory of the first layouts, part by part.

Below them stand the steps of the first layout's pipeline, if it has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fusedops.parallel.pipeline.schedules import table
from fusedops.parallel.pipeline.timeline import timeline
from fusedops.planner import TimedLayout, TimedRanking
from fusedops.terminal import svg

# Parts of a step by what they are, in the order of the tables and of the bars.
KINDS = {
    "compute": ("products", "attention", "elementwise", "head"),
    "recomputation": ("recomputation",),
    "idle device": ("layers", "host", "step"),
    "exposed communication": ("tensor", "context", "experts", "pipeline", "data", "offload"),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
}
# From the colour-blind safe palette of Okabe and Ito, in an order of its own.
_COLOURS = ("#0072B2", "#56B4E9", "#999999", "#D55E00", "#F0E442", "#009E73", "#CC79A7")
_WIDTH, _LEFT, _RIGHT, _BAR, _STEP, _TOP = 1000, 380, 80, 16, 22, 40


def kinds_of(row: TimedLayout) -> dict[str, float]:
    """Return the seconds of a step by what they are."""
    return {kind: sum(row.time.parts[name] for name in names) for kind, names in KINDS.items()}


def picture(plan: TimedRanking, named: Sequence[str]) -> str:
    """Return the SVG of at least one row; ``named`` has a line for each."""
    rows = plan.rows
    times = [kinds_of(row) for row in rows]
    sizes = [
        {name: size / 2**30 for name, size in row.estimate.parts.items() if size} for row in rows
    ]
    height, panels = 0, []
    for title, values, unit, limit in (
        ("seconds of a step", times, "s", None),
        ("memory of the fullest device", sizes, "GiB", plan.memory / 2**30),
    ):
        panels.append(_panel(height, "\n".join(_bars(title, named, values, unit, limit))))
        height += _TOP + _STEP * len(rows) + 24
    pipeline = _pipeline(rows[0])
    if pipeline:
        panels.append(_panel(height, pipeline))
        height += 52 + 30 * rows[0].layout.parallel.pp
    return svg.document(_WIDTH, height, "layouts by time and memory", panels, heading=False)


def _panel(top: int, content: str) -> str:
    return svg.element("g", content, transform=f"translate(0 {top})")


def _bars(
    title: str,
    named: Sequence[str],
    values: Sequence[Mapping[str, float]],
    unit: str,
    limit: float | None,
) -> Iterator[str]:
    """Yield a bar for each row, of one segment for each part."""
    names = list(dict.fromkeys(name for parts in values for name, part in parts.items() if part))
    longest = max(limit or 0.0, *(sum(parts.values()) for parts in values))
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    yield svg.text(8, 16, title, font_size=14)
    x = _LEFT
    for name, colour in zip(names, _COLOURS, strict=False):
        yield from svg.legend(x, 22, name, colour)
        x += 24 + round(6.2 * len(name))
    for index, (label, parts) in enumerate(zip(named, values, strict=True)):
        y = _TOP + _STEP * index
        short = label if len(label) < 64 else f"{label[:62]}.."
        yield svg.text(8, y + 12, f"{index + 1}: {short}", font_size=11)
        at = float(_LEFT)
        for name, colour in zip(names, _COLOURS, strict=False):
            width = parts.get(name, 0.0) * scale
            if width:
                tip = svg.element("title", svg.quoted(f"{name} {parts[name]:.3g} {unit}"))
                yield svg.element("rect", tip, x=at, y=y, width=width, height=_BAR, fill=colour)
            at += width
        yield svg.text(at + 5, y + 12, f"{sum(parts.values()):.3g} {unit}")
    if limit is not None:
        x = round(_LEFT + limit * scale)
        bottom = _TOP + _STEP * len(values)
        yield svg.element("line", x1=x, y1=_TOP - 4, x2=x, y2=bottom, stroke="#222")


def _pipeline(row: TimedLayout) -> str:
    """Return the timeline of a layout's pipeline as SVG; empty without one."""
    config = row.layout.parallel
    if config.pp == 1:
        return ""
    # More micro-batches repeat the same steady state.
    shown = min(config.microbatches, 4 * config.pp)
    shown -= shown % config.pp if config.microbatches % config.pp == 0 else 0
    line = timeline(table(config.pipeline_schedule, config.pp, shown, config.virtual))
    return line.svg().replace("<svg ", f'<svg width="{_WIDTH}" height="{52 + 30 * config.pp}" ', 1)
