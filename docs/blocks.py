"""Blocks of a page that a generator writes, between two comments of a name."""

from __future__ import annotations

import re


def replaced(text: str, name: str, body: str) -> str:
    """Return a page with another body of one of its blocks."""
    begin, end = f"<!-- {name}: begin (generated) -->", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"a page lacks the markers {begin} and {end}: add them where it belongs")
    return pattern.sub(lambda _: f"{begin}\n{body}\n{end}", text)
