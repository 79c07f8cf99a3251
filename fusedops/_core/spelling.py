"""The known word that a misspelt one is likely to mean. No torch: command lines ask too."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# Likeness of a misspelt word to a known one, from 0 to 1, from which on the known one is suggested.
_CUTOFF = 0.5


def nearest(word: str, known: Collection[str], *, cutoff: float = _CUTOFF) -> str | None:
    """Return the known word that a misspelt one is likely to mean, or ``None``."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None
