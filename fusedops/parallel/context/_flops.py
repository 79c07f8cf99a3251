"""What torch's ``FlopCounterMode`` counts for a ring: this rank's share of all pairs of tokens.

As for the other ops, causality and windows do not lessen the count, and documents do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from fusedops.parallel.comm import collectives

_Shape = Sequence[int]


def register() -> None:
    """Register the formulae at torch's counter."""
    from torch.utils import flop_counter

    formula: Any = flop_counter.register_flop_formula  # its type knows one signature alone
    formula(torch.ops.fusedops.ring_attention)(_ring)
    formula(torch.ops.fusedops.ring_attention_backward)(_ring_backward)


def _pairs(query: _Shape, ends: Sequence[int], group: str) -> int:
    """Return pairs of query and key, of all heads."""
    ranks = collectives.group_of(group).size()
    return sum((end - start) ** 2 for start, end in pairwise(ends)) // ranks * query[1]


def _ring(query: _Shape, key: _Shape, value: _Shape, *rest: Any, **_: Any) -> int:
    return 2 * _pairs(query, rest[3], rest[-1]) * (query[3] + value[3])


def _ring_backward(*args: Any, **_: Any) -> int:
    query, _, value, *rest = args[5:]
    return 2 * _pairs(query, rest[3], rest[-1]) * (3 * query[3] + 2 * value[3])
