"""A step's memory as one SVG: bytes over the events of the step, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 760, 320, 78, 48, 34, 16
_COLOURS = ("#1f6fb4", "#c0392b", "#3a8f4d", "#8e5ea2")
_MIB = 2**20

# Bytes, layer and phase after each change.
Timeline = Sequence[tuple[int, str, str]]


def timeline(title: str, lines: Mapping[str, Timeline]) -> str:
    """Return the SVG of steps by label, each over its own events; a single one shows its layers."""
    most = max((live for line in lines.values() for live, _, _ in line), default=1) or 1
    title = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{title}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" fill="#222">{title}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(most * share, most)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"'
            ' stroke="#e3e6e9"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">'
            f"{most * share / _MIB:.1f} MiB</text>"
        )
    for number, (label, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        fill = "0.18" if len(lines) == 1 else "0.10"
        points = " ".join(
            f"{_x(index, len(line)):.1f},{_y(live, most):.1f}"
            for index, (live, _, _) in enumerate(line)
        )
        area = f"{_LEFT},{_y(0, most):.1f} {points} {_WIDTH - _RIGHT},{_y(0, most):.1f}"
        parts.append(f'<polygon points="{area}" fill="{colour}" fill-opacity="{fill}"/>')
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        )
        if label:
            peak = max((live for live, _, _ in line), default=0)
            text = escape(f"{label}: {peak / _MIB:.1f} MiB at the peak")
            x = _LEFT + 4 + 330 * (number % 2)
            parts.append(
                f'<rect x="{x}" y="{29 + 14 * (number // 2)}" width="10" height="9"'
                f' fill="{colour}"/>'
                f'<text x="{x + 15}" y="{38 + 14 * (number // 2)}" fill="#222">{text}</text>'
            )
    if len(lines) == 1:
        parts += _marks(next(iter(lines.values())))
    base = _HEIGHT - _BOTTOM + 24
    parts += [
        f'<text x="{_LEFT}" y="{base}" fill="#555">forward</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{base}" text-anchor="end" fill="#555">backward</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(index: int, count: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / max(1, count - 1)


def _y(live: float, most: int) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * live / most


def _marks(line: Timeline) -> list[str]:
    """Return a tick where a layer begins, and a line where the backward does."""
    parts = []
    before = ("", "forward")
    base = _HEIGHT - _BOTTOM
    for index, (_, layer, phase) in enumerate(line):
        at = f'<line x1="{_x(index, len(line)):.1f}" x2="{_x(index, len(line)):.1f}"'
        if phase != before[1]:
            parts.append(f'{at} y1="{_TOP}" y2="{base}" stroke="#c0392b" stroke-dasharray="3 3"/>')
        if (layer, phase) != before and layer:
            title = f"<title>{escape(layer)}</title>"
            parts.append(f'{at} y1="{base}" y2="{base + 6}" stroke="#888">{title}</line>')
        before = (layer, phase)
    return parts
