"""A step's memory as one SVG: bytes over the events of the step, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedops.terminal import svg

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 760, 320, 78, 48, 34, 16
_BASE, _END = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
_COLOURS = ("#1f6fb4", "#c0392b", "#3a8f4d", "#8e5ea2")
_MIB = 2**20

# Bytes, layer and phase after each change.
Timeline = Sequence[tuple[int, str, str]]


def timeline(title: str, lines: Mapping[str, Timeline]) -> str:
    """Return the SVG of steps by label, each over its own events; a single one shows its layers."""
    most = max((live for line in lines.values() for live, _, _ in line), default=1) or 1
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, size = _y(most * share, most), f"{most * share / _MIB:.1f} MiB"
        parts += [
            svg.element("line", x1=_LEFT, y1=y, x2=_END, y2=y, stroke="#e3e6e9"),
            svg.text(_LEFT - 6, y + 4, size, text_anchor="end", fill="#555"),
        ]
    for number, (label, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        fill = "0.18" if len(lines) == 1 else "0.10"
        places = [(_x(index, line), _y(live, most)) for index, (live, _, _) in enumerate(line)]
        points, area = svg.points(places), svg.points([(_LEFT, _BASE), *places, (_END, _BASE)])
        parts += [
            svg.element("polygon", points=area, fill=colour, fill_opacity=fill),
            svg.element("polyline", points=points, fill="none", stroke=colour, stroke_width=1.4),
        ]
        if label:
            peak = max((live for live, _, _ in line), default=0)
            row, column = divmod(number, 2)
            words = f"{label}: {peak / _MIB:.1f} MiB at the peak"
            parts += svg.legend(_LEFT + 4 + 330 * column, 29 + 14 * row, words, colour)
    if len(lines) == 1:
        parts += _marks(next(iter(lines.values())))
    parts += [
        svg.text(_LEFT, _BASE + 24, "forward", fill="#555"),
        svg.text(_END, _BASE + 24, "backward", text_anchor="end", fill="#555"),
    ]
    return svg.document(_WIDTH, _HEIGHT, title, parts)


def _x(index: int, line: Timeline) -> float:
    return _LEFT + (_END - _LEFT) * index / max(1, len(line) - 1)


def _y(live: float, most: int) -> float:
    return _BASE - (_BASE - _TOP) * live / most


def _marks(line: Timeline) -> list[str]:
    """Return a tick where a layer begins, and a line where the backward does."""
    parts = []
    before = ("", "forward")
    for index, (_, layer, phase) in enumerate(line):
        at = {"x1": _x(index, line), "x2": _x(index, line)}
        if phase != before[1]:
            line_style = {"stroke": "#c0392b", "stroke_dasharray": "3 3"}
            parts.append(svg.element("line", **at, y1=_TOP, y2=_BASE, **line_style))
        if (layer, phase) != before and layer:
            title = svg.element("title", svg.quoted(layer))
            parts.append(svg.element("line", title, **at, y1=_BASE, y2=_BASE + 6, stroke="#888"))
        before = (layer, phase)
    return parts
