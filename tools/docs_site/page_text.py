"""Markdown as GitHub reads it, in the form of Python-Markdown: comments, fences and lists."""

from __future__ import annotations

import re

_FENCE = re.compile(r" *(```+|~~~+)")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_ITEM = re.compile(r"( *)([*+-]|\d+\.)( +)")


def without_comments(text: str) -> str:
    """Remove HTML comments from a part of a page that is not fenced."""
    return _COMMENT.sub("", text)


def split_fences(text: str) -> list[tuple[str, bool]]:
    """Return the parts of a page between and inside fenced blocks, and which are fenced.

    A comment that has a fence in it stays one part.
    """
    parts: list[tuple[str, bool]] = []
    lines: list[str] = []
    fence, comment = "", False
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            lines.append(line)
            if mark and mark[1].startswith(fence):
                parts.append(("".join(lines), True))
                lines, fence = [], ""
        elif mark and not comment:
            parts.append(("".join(lines), False))
            lines, fence = [line], mark[1]
        else:
            comment = line.rfind("<!--") > line.rfind("-->") or (comment and "-->" not in line)
            lines.append(line)
    parts.append(("".join(lines), bool(fence)))
    return parts


def indent_lists(text: str) -> str:
    """Indent what belongs to items of lists by four columns for each level."""
    lines: list[str] = []
    offsets: list[int] = []  # columns of the texts of the items that contain the line
    fence = ""
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" "))
        mark = _FENCE.match(line)
        if line.strip() and not fence:
            while offsets and indent < offsets[-1]:
                offsets.pop()
        shift = 4 * len(offsets) - (offsets[-1] if offsets else 0)
        lines.append(line if not line.strip() else " " * max(0, indent + shift) + line.lstrip(" "))
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        elif not fence and (item := _ITEM.match(line)) and (offsets or indent < 4):
            offsets.append(item.end())
    return "".join(lines)
