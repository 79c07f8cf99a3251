"""How many terms are summed into one element of a result: the tests' error budget grows with it.

A rule takes the sample and answers for its outputs and for the gradient of each leaf. What a leaf
that is broadcast (a bias, a mask) collects over the other dims is counted by the sizes of the
leaves; what the op itself sums is the spec's to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusedops.specs.spec import Depth, Sample


def of_rows(length: Callable[[Sample], int]) -> Callable[[Sample], Depth]:
    """Return the rule of an op that sums over rows of ``length(sample)`` elements."""

    def rule(sample: Sample) -> Depth:
        terms = length(sample)
        return Depth(terms, tuple(terms * shares for shares in _shares(sample)))

    return rule


def elementwise(sample: Sample) -> Depth:
    """Return the depth of an op that sums nothing, but gradients over dims that it broadcasts."""
    return Depth(1, _shares(sample))


def last_dim(sample: Sample) -> int:
    """Return the row length of an op whose rows are the last dim of its first argument."""
    return int(sample.args[0].shape[-1])


def normalized(position: int) -> Callable[[Sample], int]:
    """Return what gives the row length of a norm: ``normalized_shape`` is this argument."""
    return lambda sample: math.prod(sample.args[position])


def _shares(sample: Sample) -> tuple[int, ...]:
    largest = max((leaf.numel() for leaf in sample.leaves), default=1)
    return tuple(max(1, largest // max(1, leaf.numel())) for leaf in sample.leaves)
