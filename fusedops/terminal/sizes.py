"""Bytes and counts as people write them: ``32GiB``, ``80 GB``, ``12.80 B``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_UNITS = {
    f"{prefix}{middle}b": base**power
    for power, prefix in enumerate(("", "k", "m", "g", "t", "p"))
    for middle, base in (("", 1000), ("i", 1024))
    if prefix or not middle
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return how many bytes a text such as ``"32GiB"``, ``"80 GB"`` or ``"1024B"`` means.

    GB is 10**9 bytes, GiB 2**30; upper and lower case are the same.

    Raises:
        ValueError: it is no size, is not positive, or its unit is missing or not known.

    Example:
        >>> parse_bytes("1.5 GiB")
        1610612736
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, as 32GiB or 80GB")
    number, unit = match.groups()
    if not unit:
        raise ValueError(
            f"{text!r} is not a size: its unit is missing; did you mean {number}GiB? "
            f"({number}B would be bytes)"
        )
    scale = _UNITS.get(unit.lower())
    if scale is None:
        raise ValueError(
            f"{text!r} is not a size: unit {unit!r} is not known; "
            "GB is 10**9 bytes, GiB 2**30 (also k, M, T, P)"
        )
    exact = float(number) * scale
    if exact == math.inf:
        raise ValueError(f"{text[:20]!r}... is not a size: there is no such number of bytes")
    size = round(exact)
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: it must be more than 0 bytes")
    return size


def show_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit of 1024 in which it is at least 1.

    Example:
        >>> show_bytes(1610612736)
        '1.50 GiB'
    """
    return _in_units(size, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def show_count(count: float) -> str:
    """Return a number of parameters as the field writes it.

    Example:
        >>> show_count(12_800_000_000)
        '12.80 B'
    """
    return _in_units(count, ("", "K", "M", "B", "T"), 1000)


def _in_units(value: float, units: Sequence[str], base: int) -> str:
    """Return a value in the largest unit in which it is at least 1, with three or four digits."""
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = 2 if power and abs(value) < 100 else 0
    return f"{value:.{digits}f} {units[power]}".rstrip()
