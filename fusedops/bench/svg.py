"""Pictures as SVG: bars and dots of speed-ups, lines over sizes, and buffers in a block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _RIGHT, _TOP, _STEP, _THICK = 760, 60, 46, 24, 11
_LEFT, _PER_LETTER = 190, 6.4


@dataclass(frozen=True)
class Bar:
    """One line of the picture."""

    label: str  # what stands in front of it
    # times faster than eager; ``None`` where other work disturbed the measurement
    ours: float | None
    compiled: float | None = None  # the same of torch.compile; ``None`` where it was not measured


def bars(title: str, lines: Sequence[Bar]) -> str:
    """Return the SVG, a line per bar in the given order."""
    left = max(_LEFT, round(_PER_LETTER * max((len(line.label) for line in lines), default=0)) + 16)
    height = _TOP + _STEP * len(lines) + 10
    longest = max(1.0, *(max(line.ours or 0.0, line.compiled or 0.0) for line in lines))
    scale = (_WIDTH - left - _RIGHT) / longest
    title = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{title}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" fill="#222">{title}</text>',
        f'<rect x="{left}" y="29" width="10" height="9" fill="#1f6fb4"/>',
        f'<text x="{left + 15}" y="38" fill="#222">fusedops</text>',
        f'<rect x="{left + 95}" y="29" width="10" height="9" fill="#b9c2cb"/>',
        f'<text x="{left + 110}" y="38" fill="#222">torch.compile</text>',
    ]
    for index, bar in enumerate(lines):
        y = _TOP + _STEP * index
        end = (bar.ours or 0.0) * scale
        figure = "disturbed" if bar.ours is None else f"{bar.ours:.2f}"
        parts += [
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end" fill="#222">'
            f"{escape(bar.label)}</text>",
            f'<rect x="{left}" y="{y}" width="{end:.1f}" height="{_THICK}" fill="#1f6fb4"/>',
            f'<text x="{left + end + 5:.1f}" y="{y + 10}" fill="#222">{figure}</text>',
        ]
        if bar.compiled:
            parts.append(
                f'<rect x="{left}" y="{y + _THICK}" width="{bar.compiled * scale:.1f}" height="5"'
                ' fill="#b9c2cb"/>'
            )
    x = left + scale
    parts += [
        f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{height - 6}" stroke="#c0392b"'
        ' stroke-dasharray="3 3"/>',
        f'<text x="{x + 3:.1f}" y="{height - 1}" font-size="10" fill="#c0392b">eager</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def dots(title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return the SVG of measurements of the same things over time, on a logarithmic axis.

    Args:
        title: of the picture.
        rows: labels, and the positive ratios of each from the oldest to the newest.
    """
    left = max(_LEFT, round(_PER_LETTER * max(len(label) for label, _ in rows)) + 16)
    step, values = 16, [value for _, ratios in rows for value in ratios]
    height = _TOP + step * len(rows) + 24
    low, high = math.log(min(0.8, *values)), math.log(max(1.25, *values) * 1.05)

    def place(value: float) -> float:
        return left + (math.log(value) - low) / (high - low) * (_WIDTH - left - _RIGHT)

    title = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{title}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" fill="#222">{title}</text>',
    ]
    for tick in (0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100):
        if low <= math.log(tick) <= high:
            x, colour = place(tick), "#c0392b" if tick == 1 else "#e3e3e3"
            parts += [
                f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{height - 18}"'
                f' stroke="{colour}"/>',
                f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle" fill="#222">'
                f"{tick:g}</text>",
            ]
    for index, (label, ratios) in enumerate(rows):
        y = _TOP + step * index
        *before, newest = ratios
        parts += [
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="#222">'
            f"{escape(label)}</text>",
            *(
                f'<circle cx="{place(value):.1f}" cy="{y}" r="3" fill="#b9c2cb"/>'
                for value in before
            ),
            f'<circle cx="{place(newest):.1f}" cy="{y}" r="4" fill="#1f6fb4"/>',
            f'<text x="{place(newest) + 8:.1f}" y="{y + 4}" fill="#222">{newest:.2f}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


# From the colour-blind safe palette of Okabe and Ito.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")
_PLOT_HEIGHT, _PLOT_LEFT, _LEGEND_STEP = 360, 70, 16


def lines(
    title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Return the SVG of one line per series, both axes logarithmic.

    Args:
        title: of the picture.
        x_name: what the horizontal axis shows.
        y_name: what the vertical axis shows.
        series: positive ``(x, y)`` by name, at least one.
    """
    points = [point for values in series.values() for point in values]
    lows = [math.log(min(point[axis] for point in points)) for axis in (0, 1)]
    spans = [
        max(math.log(max(point[axis] for point in points)) - lows[axis], 1e-9) for axis in (0, 1)
    ]
    top = _TOP + _LEGEND_STEP * len(series)
    height = top + _PLOT_HEIGHT + 44

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log(x) - lows[0]) / spans[0] * (_WIDTH - _PLOT_LEFT - 20)
        up = (math.log(y) - lows[1]) / spans[1] * _PLOT_HEIGHT
        return round(_PLOT_LEFT + right, 1), round(top + _PLOT_HEIGHT - up, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" fill="#222">{escape(title)}: {escape(y_name)}</text>',
        f'<text x="{_WIDTH - 20}" y="{height - 6}" text-anchor="end" fill="#222">'
        f"{escape(x_name)}</text>",
    ]
    for axis, base in ((0, 16), (1, 10)):
        power = math.ceil(lows[axis] / math.log(base) - 1e-9)
        while power * math.log(base) <= lows[axis] + spans[axis] + 1e-9:
            value = float(base) ** power
            low_x, low_y = math.exp(lows[0]), math.exp(lows[1])
            x, y = place(value, low_y) if axis == 0 else place(low_x, value)
            end = f'x2="{x}" y2="{top}"' if axis == 0 else f'x2="{_WIDTH - 20}" y2="{y}"'
            anchor = "middle" if axis == 0 else "end"
            label_x, label_y = (x, y + 16) if axis == 0 else (x - 6, y + 4)
            parts += [
                f'<line x1="{x}" y1="{y}" {end} stroke="#e3e3e3"/>',
                f'<text x="{label_x}" y="{label_y}" text-anchor="{anchor}" fill="#222">'
                f"{value:g}</text>",
            ]
            power += 1
    for index, (name, values) in enumerate(series.items()):
        colour, y = _COLOURS[index % len(_COLOURS)], _TOP + _LEGEND_STEP * index
        dash = ' stroke-dasharray="5 3"' if index >= len(_COLOURS) else ""
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in values))
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
            f'<line x1="{_PLOT_LEFT}" y1="{y - 4}" x2="{_PLOT_LEFT + 24}" y2="{y - 4}"'
            f' stroke="{colour}" stroke-width="2"{dash}/>',
            f'<text x="{_PLOT_LEFT + 32}" y="{y}" fill="#222">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def rectangles(title: str, boxes: Sequence[tuple[int, int, int, int]]) -> str:
    """Return a picture of buffers in a block: time to the right, offsets upwards.

    Args:
        title: what stands above it.
        boxes: begin and end in time, and first and last offset, of each buffer.
    """
    left, top, width, height = 20, 40, 720, 400
    begin = min((box[0] for box in boxes), default=0)
    end = max((box[1] for box in boxes), default=1)
    most = max((box[3] for box in boxes), default=1) or 1
    title = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + height + 20}"'
        f' role="img" aria-label="{title}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{top + height + 20}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="14" fill="#222">{title}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="#eef1f4"/>',
    ]
    for number, (first, last, low, high) in enumerate(boxes):
        x = left + width * (first - begin) / (end - begin)
        y = top + height * (1 - high / most)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width * (last - first) / (end - begin):.2f}"'
            f' height="{height * (high - low) / most:.2f}" fill="{colour}"'
            ' stroke="white" stroke-width="0.3"/>'
        )
    parts.append(
        f'<text x="{left}" y="{top + height + 15}" fill="#222">time: {begin} to {end}</text></svg>'
    )
    return "\n".join(parts)
