"""Dropout that does not depend on the layout: each element draws by its index in the global batch.

One process would drop elements of ``[B, S, H]`` and scores of ``[B, N, S, S]`` by their linear
indices there, from one seed a call. A rank that has some of the sequences, a part of each sequence,
or some of the heads draws the same numbers when its seed gives the indices of its elements
(``_core/philox.py``): nothing is communicated, stored or drawn twice.

All ranks must draw from the same seeds. A shard of balanced context parallelism is two pieces of
each sequence; the tokens of one rank of sequence parallelism are a part of that shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardOffsets:
    """Where the shard of a rank starts in the global tensors."""

    batch_part: int = 0  # of the sequences: the rank among those that have others
    sequence_part: int = 0  # of the tokens of a shard of each sequence, which are contiguous
    sequence_parts: int = 1  # how many parts those have
    head_part: int = 0  # of the heads of attention
    head_parts: int = 1  # how many parts those have
    context_part: int = 0  # which shard of each sequence, of ``shard_sequence``
    context_parts: int = 1  # how many shards there are

    def rows(self, first: int, tokens: int, features: int) -> tuple[int, ...]:
        """Return the numbers of a seed for activations ``[B, s, H]``.

        ``first`` is how many sequences come before these in the global batch.
        """
        length = tokens * self.sequence_parts * self.context_parts
        pieces = self.pieces(tokens)
        unit = math.gcd(*(stop - start for start, stop in pieces)) or 1
        starts = [at for start, stop in pieces for at in range(start, stop, unit)] or [0]
        unit, run = unit * max(1, features), len(starts) * unit * max(1, features)
        return run, length * features, unit, *((first * length + at) * features for at in starts)

    def scores(self, first: int, heads: int, length: int) -> tuple[int, int, int]:
        """Return the numbers of a seed for scores ``[B, n, S, S]``; ``heads`` is ``n``."""
        square = length * length
        per_sequence = heads * self.head_parts * square
        return first * per_sequence + self.head_part * heads * square, per_sequence, square

    def pieces(self, tokens: int) -> list[tuple[int, int]]:
        """Return which tokens of a sequence the ``tokens`` here are, as ranges."""
        first = self.sequence_part * tokens
        if self.context_parts == 1:
            return [(first, first + tokens)]
        from fusedops.parallel.context.layout import merged, mirrored

        length = tokens * self.sequence_parts * self.context_parts
        ranges, before = [], 0
        for start, stop in merged(mirrored(0, length, self.context_parts, self.context_part)):
            low = start + max(0, first - before)
            high = min(stop, start + first + tokens - before)
            if low < high:
                ranges.append((low, high))
            before += stop - start
        return ranges
