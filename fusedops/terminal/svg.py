"""Pictures as SVG: elements, a legend's entry, and the document around them."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK = "#222"
# From the colour-blind safe palette of Okabe and Ito.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")


def quoted(text: str) -> str:
    """Return a text as an attribute or an element holds it."""
    return escape(text, {'"': "&quot;"})


def element(name: str, content: str = "", /, **attributes: float | str) -> str:
    """Return an element.

    Args:
        name: of the element.
        content: other elements, or a text that ``quoted`` returned.
        **attributes: ``_`` stands for ``-``; a ``float`` gets one digit behind the point.
    """
    words = [name]
    for key, value in attributes.items():
        shown = f"{value:.1f}" if isinstance(value, float) else value
        words.append(f'{key.replace("_", "-")}="{shown}"')
    head = f"<{' '.join(words)}"
    return f"{head}>{content}</{name}>" if content else f"{head}/>"


def text(x: float, y: float, words: str, /, **attributes: float | str) -> str:
    """Return a text whose first letter stands on the line ``y``."""
    return element("text", quoted(words), x=x, y=y, **attributes)


def legend(x: float, y: float, words: str, colour: str) -> list[str]:
    """Return a coloured box and what it stands for."""
    box = element("rect", x=x, y=y, width=10, height=9, fill=colour)
    return [box, text(x + 15, y + 9, words, fill=INK)]


def points(pairs: Iterable[tuple[float, float]]) -> str:
    """Return the points of a line or of an area."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def document(
    width: int,
    height: int,
    title: str,
    parts: Iterable[str],
    *,
    font_size: int = 12,
    heading: bool = True,
) -> str:
    """Return a picture of ``parts`` on white; its title is for screen readers, and its heading."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{quoted(title)}" font-family="sans-serif" font-size="{font_size}">'
    )
    lines = [head, element("rect", width=width, height=height, fill="white")]
    if heading:
        lines.append(text(10, 20, title, font_size=14, fill=INK))
    return "\n".join([*lines, *parts, "</svg>"]) + "\n"
