"""How the time for the calibration of one model is shared out among its classes and shapes.

Small ones come first: they are many, and what they leave over goes to the large. A projection to a
vocabulary alone may take longer for one run than there is time for everything (38 million weights
take 0.4 s for 16 rows, forward and backward, on a busy Zen 4 core): from the products before it is
known what it would take, and it is not even tried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

# Weights of a module below which its time says nothing about that of larger ones.
_TELLING = 100_000
# What a module without weights gets, in the unit of the square root of a number of weights.
_LEAST = 1000.0


class TimeShares:
    """The time that is left, and what is still to be measured in it.

    Attributes:
        runs: how many runs of a module its measurement takes.
    """

    def __init__(self, seconds: float, runs: int) -> None:
        self.runs = runs
        self._deadline = time.perf_counter() + seconds
        self._sizes: dict[str, int] = {}
        self._rate = 0.0

    def plan(self, sizes: Mapping[str, int]) -> None:
        """Tell what is to be measured: the number of weights by key."""
        self._sizes = dict(sizes)

    def left(self) -> float:
        """Return the seconds until the time is over."""
        return self._deadline - time.perf_counter()

    def take(self, key: str) -> float:
        """Return the seconds for ``key``, which is measured now or never; none may be left."""
        left = self.left()
        own = _weight(self._sizes.pop(key, 0))
        others = (size for size in self._sizes.values() if self.expected(size) * self.runs < left)
        return left * own / (own + sum(map(_weight, others)))

    def learn(self, size: int, seconds: float) -> None:
        """Tell what one run of a module of so many weights takes."""
        if size >= _TELLING:
            self._rate = seconds / size

    def expected(self, size: int) -> float:
        """Return the seconds of one run of a module of so many weights; 0 where nobody knows."""
        return self._rate * size if size >= _TELLING else 0.0


def _weight(size: int) -> float:
    # Of twice the weights, half as many rows say as much.
    return _LEAST + size**0.5
