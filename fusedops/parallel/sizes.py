"""Sizes of a mesh of ranks, and the messages for sizes that do not fit, with those that would."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NoReturn

from fusedops._core import checks

# The order in which ranks are numbered: neighbours share a tensor, the farthest are stages.
DENSE = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a mesh of ranks.

    There are ``pp * dp * cp * tp`` ranks, numbered in that order. Experts lie on ``ep`` of the
    ``dp * cp`` ranks that see different tokens, so that these are ``edp * ep`` at the same time.

    Args:
        pp: pipeline parallel: stages of layers.
        dp: data parallel: ranks that get different sequences.
        cp: context parallel: shares of each sequence.
        tp: tensor parallel: shares of each product.
        ep: expert parallel: shares of the experts.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is not positive, or ``ep`` does not divide ``dp * cp``.

    Example:
        >>> from fusedops.parallel import Sizes
        >>> Sizes(dp=4, tp=2, ep=2).edp
        2
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.integer("Sizes", field.name, getattr(self, field.name), least=1)
        check_experts("Sizes", self.ep, self.data)

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data(self) -> int:
        """Ranks that see different tokens: ``dp * cp``."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.data // self.ep


def check_ranks(op: str, sizes: Mapping[str, int], ranks: int, noun: str = "devices") -> None:
    """Raise unless the product of the sizes is the number of ranks, which ``noun`` names.

    The message has the product and, for each size, what would fit.
    """
    product = math.prod(sizes.values())
    if product == ranks:
        return
    shown = f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {product}"
    fits = []
    for name, size in sizes.items():
        others = product // size
        if ranks % others == 0:
            fits.append(f"{name} {ranks // others}")
    hint = f"; {' or '.join(fits)} would fit" if fits else ""
    raise ValueError(f"{op}: {shown} must be the {ranks} {noun}{hint}")


def check_divides(op: str, name: str, size: int, total: int, what: str) -> None:
    """Raise unless a size divides ``total``, the number of ``what``; names the nearest that do."""
    if total % size:
        refuse(op, name, f"a divisor of {what}, {total}", size, divisors(total))


def check_experts(op: str, ep: int, data: int, experts: int | None = None) -> None:
    """Raise unless ``ep`` ranks of the ``data = dp * cp`` can share the experts, if given.

    The message has the nearest sizes that fit.
    """
    fits = [n for n in divisors(data if experts is None else experts) if data % n == 0]
    if experts is not None and experts % ep:
        refuse(op, "ep", f"a divisor of the {experts} experts", ep, fits)
    if data % ep:
        refuse(op, "ep", f"a divisor of dp x cp = {data}, inside of which it lies", ep, fits)


def refuse(op: str, name: str, expected: str, got: int, fits: Iterable[int]) -> NoReturn:
    """Raise the ``ValueError`` of a size, with the nearest of those that would fit."""
    near = sorted(sorted(fits, key=lambda n: abs(math.log(n / got)))[:4])
    hint = f" ({', '.join(map(str, near))} would fit)" if near else ""
    checks.fail(op, name, expected, f"{got}{hint}")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, up to 2**14."""
    return [n for n in range(1, min(number, 1 << 14) + 1) if number % n == 0]
