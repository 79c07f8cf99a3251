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

import torch

from fusedops._core import checks, philox


@dataclass(frozen=True)
class ShardOffsets:
    """Where the shard of a rank starts in the global tensors.

    Raises:
        ValueError: a part is not below the number of parts.
        TypeError: one is no int.

    Example:
        >>> import torch
        >>> from fusedops.parallel.dropout import ShardOffsets
        >>> ShardOffsets(sequence_part=1, sequence_parts=2).hidden_seed(torch.ones(2, 3, 8))[2:]
        tensor([24, 48, 24, 24])
    """

    batch_part: int = 0  # of the sequences: the rank among those that have others
    sequence_part: int = 0  # of the tokens of a shard of each sequence, which are contiguous
    sequence_parts: int = 1  # how many parts those have
    head_part: int = 0  # of the heads of attention
    head_parts: int = 1  # how many parts those have
    context_part: int = 0  # which shard of each sequence, of ``shard_sequence``
    context_parts: int = 1  # how many shards there are

    def __post_init__(self) -> None:
        checks.integer("ShardOffsets", "batch_part", self.batch_part, least=0)
        for what in ("sequence", "head", "context"):
            part, parts = getattr(self, f"{what}_part"), getattr(self, f"{what}_parts")
            checks.integer("ShardOffsets", f"{what}_parts", parts, least=1)
            checks.integer("ShardOffsets", f"{what}_part", part, least=0)
            if part >= parts:
                checks.fail("ShardOffsets", f"{what}_part", f"below {what}_parts, {parts}", part)

    def hidden_seed(self, input: torch.Tensor, seed: torch.Tensor | None = None) -> torch.Tensor:
        """Return a seed for dropout of activations ``[B, s, H]``.

        ``seed`` ``[2]`` is that of the global batch; by default new numbers of torch's generator.

        Raises:
            ValueError: they are not of three dims.
        """
        if input.dim() != 3:
            checks.fail("ShardOffsets", "input", "[sequences, tokens, features]", list(input.shape))
        seed = philox.new_seed(input.device) if seed is None else seed
        sequences, tokens, features = input.shape
        return philox.placed(seed, self.rows(self.batch_part * sequences, tokens, features))

    def score_seed(
        self, query: torch.Tensor, length: int, seed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a seed for dropout in attention of complete sequences, the heads here.

        ``query`` is ``[B, n, s, D]``, and ``length`` the tokens of a sequence.

        Raises:
            ValueError: they are not of four dims.
        """
        if query.dim() != 4:
            expected = "[sequences, heads, tokens, features]"
            checks.fail("ShardOffsets", "query", expected, list(query.shape))
        seed = philox.new_seed(query.device) if seed is None else seed
        sequences, heads = query.shape[:2]
        return philox.placed(seed, self.scores(self.batch_part * sequences, heads, length))

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
