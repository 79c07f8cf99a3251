"""Checks and texts of placements, and names that match a pattern."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fusedops._core import checks
from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.groups import pattern_of

_SHARD = re.compile(r"S\((\d+)\)$")


def matching_names(op: str, pattern: str, names: Mapping[str, Any]) -> list[str]:
    """Return the names that a pattern matches.

    Raises:
        KeyError: there is none; the message has the nearest name.
    """
    matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matches:
        known = list(dict.fromkeys([*map(pattern_of, names), *names]))
        near = checks.nearest(pattern, known)
        hint = f"did you mean {near!r}" if near else f"one is {known[0]!r}" if known else "none"
        raise KeyError(f"{op}: no parameter matches {pattern!r}: {hint}")
    return matches


def checked_placements(
    what: str,
    placements: Any,
    shape: Sequence[int],
    sizes: Sequence[int],
    dims: Sequence[str],
) -> Placements:
    """Return placements of a parameter as a tuple.

    Raises:
        TypeError: they are no placements.
        ValueError: there is not one for each mesh dimension, or a size cannot be divided.
    """
    if isinstance(placements, Placement):
        placements = (placements,)
    if not isinstance(placements, (tuple, list)) or not all(
        isinstance(place, Placement) for place in placements
    ):
        raise TypeError(
            f"{what} needs placements such as (Replicate(), Shard(0)), got {placements!r}"
        )
    if len(placements) != len(sizes):
        raise ValueError(
            f"{what} needs one placement for each of the mesh dimensions {', '.join(dims)}, "
            f"got {len(placements)}"
        )
    parts = [1] * len(shape)
    for place, size in zip(placements, sizes, strict=True):
        if isinstance(place, Partial) or not isinstance(place, (Shard, Replicate)):
            raise ValueError(f"{what} must be Shard or Replicate, got {place}")
        if isinstance(place, Shard):
            if not -len(shape) <= place.dim < len(shape):
                raise ValueError(
                    f"{what} has the shape {tuple(shape)}, which has no dim {place.dim} to shard"
                )
            parts[place.dim] *= size
    for dim, (length, part) in enumerate(zip(shape, parts, strict=True)):
        if length % part:
            raise ValueError(
                f"{what} has {length} elements in dim {dim}, which {part} ranks do not divide"
            )
    return tuple(
        Shard(place.dim % len(shape)) if isinstance(place, Shard) else Replicate()
        for place in placements
    )


def show_placement(place: Any) -> str:
    """Return ``"R"`` or ``"S(dim)"``."""
    return f"S({place.dim})" if isinstance(place, Shard) else "R"


def read_placement(text: str) -> Any:
    """Return the placement of ``show_placement``'s text.

    Raises:
        TypeError: the text is none.
    """
    match = _SHARD.match(text)
    if match is None and text != "R":
        raise TypeError(f"{text!r} is no placement")
    return Shard(int(match[1])) if match else Replicate()
