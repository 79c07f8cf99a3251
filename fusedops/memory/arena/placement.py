"""Offsets for buffers of known lifetimes in one block of memory: ``place``.

A step that allocates the same buffers each time can have them at fixed addresses in a block that is
hardly larger than what is alive at its fullest moment. The smallest block is an NP-hard problem
(dynamic storage allocation); ``csrc/host/arena.h`` says how it is searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.runtime import host_module

_MOST = 2**63 - 1
_FREE = -1  # as csrc/host/arena.h


@dataclass(frozen=True)
class Placement:
    """Where buffers lie in a block.

    Attributes:
        offsets: of each buffer, in bytes.
        height: the bytes of the block: the largest offset plus size.
        bound: bytes below which no placement is: the most that is alive at the same time, or more
            if a complete search has proven more.
        capacity: that was asked for, or ``None``.
    """

    offsets: tuple[int, ...]
    height: int
    bound: int
    capacity: int | None = None

    @property
    def gap(self) -> float:
        """How much larger than the bound the block is: 0.02 is 2 %."""
        return self.height / self.bound - 1 if self.bound else 0.0

    @property
    def exact(self) -> bool:
        """Whether no placement is smaller."""
        return self.height == self.bound

    @property
    def fits(self) -> bool:
        """Whether the block fits into the capacity; true without one."""
        return self.capacity is None or self.height <= self.capacity


def place(
    lower: Sequence[int] | torch.Tensor,
    upper: Sequence[int] | torch.Tensor,
    size: Sequence[int] | torch.Tensor,
    *,
    capacity: int | None = None,
    alignment: int = 1,
    pinned: Mapping[int, int] | None = None,
    seconds: float = 1.0,
) -> Placement:
    """Place buffers, of which those that live at the same time must not overlap.

    Rules for the order of the buffers are tried first, then a complete search, and the improvement
    of orders by local search. It ends when the block is as small as possible or fits into the
    capacity, and at the latest after so many seconds. The same input gives the same placement,
    unless the time runs out.

    Args:
        lower: ``[n]``, when each buffer begins to live; integers of any unit.
        upper: ``[n]``, when it has ended: buffer i lives in ``[lower[i], upper[i])``.
        size: ``[n]``, bytes.
        capacity: bytes of the block that would be small enough; default: as small as possible.
        alignment: every offset is a multiple of it.
        pinned: offsets that some buffers must have, by their index.
        seconds: how long to search at most.

    Returns:
        The offsets, and how far from the smallest possible block they are. If no placement within
        the capacity was found, the smallest one that was found: ``fits`` is false.

    Raises:
        TypeError: a number is no integer.
        ValueError: lengths differ, a lifetime is empty, a size is negative, sizes together exceed
            2**63 - 1, the capacity is below the bound, or pinned buffers overlap.
        UnsupportedError: the compiled library is missing.

    Example:
        >>> from fusedops.memory import arena
        >>> found = arena.place([0, 3, 0, 9], [3, 9, 9, 21], [4, 4, 4, 4])
        >>> found.height, found.bound
        (8, 8)
    """
    lowers, uppers, sizes = (
        _integers(name, values)
        for name, values in (("lower", lower), ("upper", upper), ("size", size))
    )
    checks.integer("arena.place", "alignment", alignment, least=1)
    if capacity is not None:
        checks.integer("arena.place", "capacity", capacity, least=0)
    checks.finite("arena.place", "seconds", seconds, least=0.0)
    _check(lowers, uppers, sizes)
    aligned = [-(-nbytes // alignment) * alignment for nbytes in sizes]
    if sum(aligned) > _MOST:
        checks.fail("arena.place", "size", "at most 2**63 - 1 in all", sum(aligned))
    offsets = _pinned(pinned or {}, lowers, uppers, aligned, alignment)
    bound = most_alive(lowers, uppers, aligned)
    if capacity is not None and capacity < bound:
        expected = f"at least {bound}, the bytes that are alive at the same time"
        checks.fail("arena.place", "capacity", expected, capacity)
    module = host_module.load()
    if isinstance(module, str):
        raise UnsupportedError(f"arena.place: it needs the compiled library: {module}")
    limit = _FREE if capacity is None else capacity
    result = module.place(
        lowers, uppers, aligned, pinned=offsets, capacity=limit, seconds=float(seconds)
    )
    return Placement(tuple(result["offsets"]), result["height"], result["bound"], capacity)


def _integers(name: str, values: Sequence[int] | torch.Tensor) -> list[int]:
    numbers: list[Any] = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    for index, number in enumerate(numbers):
        checks.integer("arena.place", f"{name}[{index}]", number)
    return [int(number) for number in numbers]


def _check(lowers: list[int], uppers: list[int], sizes: list[int]) -> None:
    if not len(lowers) == len(uppers) == len(sizes):
        expected = f"of the length of size, {len(sizes)}"
        name, values = ("lower", lowers) if len(lowers) != len(sizes) else ("upper", uppers)
        checks.fail("arena.place", name, expected, len(values))
    for index, (begin, end, nbytes) in enumerate(zip(lowers, uppers, sizes, strict=True)):
        if begin >= end:
            expected = f"larger than lower[{index}], {begin}"
            checks.fail("arena.place", f"upper[{index}]", expected, end)
        if nbytes < 0:
            checks.fail("arena.place", f"size[{index}]", "at least 0", nbytes)


def _pinned(
    pinned: Mapping[int, int],
    lowers: list[int],
    uppers: list[int],
    sizes: list[int],
    alignment: int,
) -> list[int]:
    """Return the offset of each buffer that is pinned, and ``_FREE`` for the others."""
    offsets = [_FREE] * len(sizes)
    for index, offset in pinned.items():
        name = f"pinned[{index}]"
        checks.integer("arena.place", name, offset, least=0)
        if not 0 <= index < len(sizes):
            checks.fail("arena.place", "pinned", f"indices below {len(sizes)}", index)
        if offset % alignment:
            checks.fail("arena.place", name, f"a multiple of alignment, {alignment}", offset)
        if offset + sizes[index] > _MOST:
            checks.fail("arena.place", name, "at most 2**63 - 1 with the size", offset)
        offsets[index] = offset
    # In the order of their offsets, each is compared with those that reach above its offset.
    below: list[int] = []
    for index in sorted((index for index in pinned if sizes[index]), key=offsets.__getitem__):
        below = [other for other in below if offsets[other] + sizes[other] > offsets[index]]
        for other in below:
            if lowers[other] < uppers[index] and lowers[index] < uppers[other]:
                one, two = max(index, other), min(index, other)
                expected = f"apart from pinned[{two}], {offsets[two]}, which lives then as well"
                checks.fail("arena.place", f"pinned[{one}]", expected, offsets[one])
        below.append(index)
    return offsets


def most_alive(lowers: Iterable[int], uppers: Iterable[int], sizes: Sequence[int]) -> int:
    """Return the most bytes that are alive at the same time."""
    changes = [(time, nbytes) for time, nbytes in zip(lowers, sizes, strict=True)]
    changes += [(time, -nbytes) for time, nbytes in zip(uppers, sizes, strict=True)]
    alive = most = 0
    for _, change in sorted(changes):  # at the same moment frees come first
        alive += change
        most = max(most, alive)
    return most
