"""Speed-ups as one SVG: a bar for ours and a thin one for torch.compile, from eager's line on."""

from __future__ import annotations

from collections.abc import Sequence
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
