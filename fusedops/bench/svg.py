"""Pictures of measurements: bars of speed-ups, lines over sizes, buffers in a block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusedops.terminal.svg import INK, PALETTE, document, element, legend, points, text

_WIDTH, _RIGHT, _TOP, _STEP, _THICK = 760, 60, 46, 24, 11
_OURS, _OTHERS, _GRID, _ONE = "#1f6fb4", "#b9c2cb", "#e3e3e3", "#c0392b"


@dataclass(frozen=True)
class Bar:
    """One line of the picture."""

    label: str  # what stands in front of it
    # times faster than eager; ``None`` where other work disturbed the measurement
    ours: float | None
    compiled: float | None = None  # the same of torch.compile; ``None`` where it was not measured


def bars(title: str, lines: Sequence[Bar]) -> str:
    """Return the SVG, a line per bar in the given order."""
    left = max(190, round(6.4 * max((len(line.label) for line in lines), default=0)) + 16)
    height = _TOP + _STEP * len(lines) + 10
    longest = max(1.0, *(max(line.ours or 0.0, line.compiled or 0.0) for line in lines))
    scale = (_WIDTH - left - _RIGHT) / longest
    parts = [*legend(left, 29, "fusedops", _OURS), *legend(left + 95, 29, "torch.compile", _OTHERS)]
    for index, bar in enumerate(lines):
        y = _TOP + _STEP * index
        end = (bar.ours or 0.0) * scale
        figure = "disturbed" if bar.ours is None else f"{bar.ours:.2f}"
        parts += [
            text(left - 8, y + 12, bar.label, text_anchor="end", fill=INK),
            element("rect", x=left, y=y, width=end, height=_THICK, fill=_OURS),
            text(left + end + 5, y + 10, figure, fill=INK),
        ]
        if bar.compiled:
            at = {"x": left, "y": y + _THICK, "width": bar.compiled * scale}
            parts.append(element("rect", **at, height=5, fill=_OTHERS))
    x = left + scale
    at = {"x1": x, "y1": _TOP - 4, "x2": x, "y2": height - 6}
    parts += [
        element("line", **at, stroke=_ONE, stroke_dasharray="3 3"),
        text(x + 3, height - 1, "eager", font_size=10, fill=_ONE),
    ]
    return document(_WIDTH, height, title, parts)


_PLOT_HEIGHT, _PLOT_LEFT, _LEGEND_STEP = 360, 70, 16


def lines(
    title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Return the SVG of one line per series of positive ``(x, y)``, both axes logarithmic."""
    columns = list(zip(*(point for values in series.values() for point in values), strict=True))
    lows = [math.log(min(column)) for column in columns]
    spans = [
        max(math.log(max(column)) - low, 1e-9) for column, low in zip(columns, lows, strict=True)
    ]
    top, right = _TOP + _LEGEND_STEP * len(series), _WIDTH - 20
    bottom = top + _PLOT_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log(x) - lows[0]) / spans[0] * (right - _PLOT_LEFT)
        up = (math.log(y) - lows[1]) / spans[1] * _PLOT_HEIGHT
        return _PLOT_LEFT + along, bottom - up

    parts = [text(right, bottom + 38, x_name, text_anchor="end", fill=INK)]
    for value in _powers(16, lows[0], spans[0]):
        x, _ = place(value, math.exp(lows[1]))
        parts += [
            element("line", x1=x, y1=bottom, x2=x, y2=top, stroke=_GRID),
            text(x, bottom + 16, f"{value:g}", text_anchor="middle", fill=INK),
        ]
    for value in _powers(10, lows[1], spans[1]):
        _, y = place(math.exp(lows[0]), value)
        parts += [
            element("line", x1=_PLOT_LEFT, y1=y, x2=right, y2=y, stroke=_GRID),
            text(_PLOT_LEFT - 6, y + 4, f"{value:g}", text_anchor="end", fill=INK),
        ]
    for index, (name, values) in enumerate(series.items()):
        y = _TOP + _LEGEND_STEP * index
        style = {"stroke": PALETTE[index % len(PALETTE)], "stroke_width": "2"}
        if index >= len(PALETTE):
            style["stroke_dasharray"] = "5 3"
        path = points(place(*point) for point in values)
        parts += [
            element("polyline", points=path, fill="none", **style),
            element("line", x1=_PLOT_LEFT, y1=y - 4, x2=_PLOT_LEFT + 24, y2=y - 4, **style),
            text(_PLOT_LEFT + 32, y, name, fill=INK),
        ]
    return document(_WIDTH, bottom + 44, f"{title}: {y_name}", parts)


def _powers(base: int, low: float, span: float) -> list[float]:
    """Return the powers of ``base`` on an axis, of which the logarithms of both ends are given."""
    first = math.ceil(low / math.log(base) - 1e-9)
    last = math.floor((low + span + 1e-9) / math.log(base))
    return [float(base) ** power for power in range(first, last + 1)]


def rectangles(title: str, boxes: Sequence[tuple[int, int, int, int]]) -> str:
    """Return a picture of buffers in a block: time to the right, offsets upwards.

    ``boxes`` have begin and end in time, and first and last offset, of each buffer.
    """
    left, top, width, height = 20, 40, 720, 400
    begin = min((box[0] for box in boxes), default=0)
    end = max((box[1] for box in boxes), default=1)
    most = max((box[3] for box in boxes), default=1) or 1
    parts = [element("rect", x=left, y=top, width=width, height=height, fill="#eef1f4")]
    for number, (first, last, low, high) in enumerate(boxes):
        at = {
            "x": f"{left + width * (first - begin) / (end - begin):.2f}",
            "y": f"{top + height * (1 - high / most):.2f}",
            "width": f"{width * (last - first) / (end - begin):.2f}",
            "height": f"{height * (high - low) / most:.2f}",
        }
        colour = PALETTE[number % len(PALETTE)]
        parts.append(element("rect", **at, fill=colour, stroke="white", stroke_width=0.3))
    parts.append(text(left, top + height + 15, f"time: {begin} to {end}", fill=INK))
    return document(_WIDTH, top + height + 20, title, parts)
