"""Which sequences a step trains on: a function of the position, for any number of ranks.

The stream is cut into sequences of ``seq_len`` tokens and their targets, and the sequences of each
epoch are put into an order by a pseudo-random permutation that is computed, not stored: any place
of any epoch is reached at once, and a position is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fusedops._core import checks, philox

_ROUNDS = 4
_LOW = 0xFFFFFFFF


class TokenBatch(NamedTuple):
    """Sequences, int64."""

    tokens: torch.Tensor  # ``[B, S]``
    labels: torch.Tensor  # ``[B, S]``: the targets of each position
    # ``[B, S]``: which document of its row each token belongs to; ``None``: a row is one
    documents: torch.Tensor | None = None
    # ``[B, S]``: the domain of each token; ``None``: nobody asked
    domains: torch.Tensor | None = None


class Sequences:
    """Sequences of a token stream in the order in which a run trains on them.

    Args:
        stream: ``[tokens]``, of an integer dtype.
        seq_len: tokens of a sequence.
        seed: of the order.
        shuffle: whether there is another order than the stream's.
        end: the token that ends a document; ``None``: all of a sequence is one.
        domains: of the tokens, given their places ``[B, S]``; ``None``: they have none.

    Raises:
        ValueError: the stream is shorter than a sequence and its last target.
    """

    def __init__(
        self,
        stream: torch.Tensor,
        seq_len: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        end: int | None = None,
        domains: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.stream, self.seq_len, self.seed, self.shuffle = stream, seq_len, seed, shuffle
        self.end, self.domains = end, domains
        self.count = (len(stream) - 1) // seq_len
        if self.count < 1:
            checks.fail("Sequences", "stream", f"longer than {seq_len} tokens", len(stream))

    def rows(self, positions: torch.Tensor) -> TokenBatch:
        """Return the sequences at these positions of the order, which continues over epochs."""
        epochs, indices = positions // self.count, positions % self.count
        if self.shuffle:
            indices = permuted(indices, epochs, self.count, self.seed)
        firsts = indices * self.seq_len
        windows = [self.stream[first : first + self.seq_len + 1] for first in firsts.tolist()]
        both = torch.stack(windows).long()
        tokens, documents = both[:, :-1].contiguous(), None
        if self.end is not None:
            ends = tokens == self.end
            documents = ends.cumsum(1) - ends.long()  # the token of the end belongs to what it ends
        domains = None
        if self.domains is not None:
            domains = self.domains(firsts[:, None] + torch.arange(self.seq_len))
        return TokenBatch(tokens, both[:, 1:].contiguous(), documents, domains)

    def microbatches(
        self, position: int, batch: int, microbatches: int = 1, share: int = 0, shares: int = 1
    ) -> Iterator[TokenBatch]:
        """Yield this rank's rows of the microbatches of a step.

        Microbatch ``m`` of the step is rows ``m * batch / microbatches`` and on, whatever the
        ranks; each rank has a slice of it.

        Args:
            position: sequences before this step.
            batch: sequences of the step, on all ranks together; ``microbatches * shares`` divides
                it.
            microbatches: parts that are computed one after another.
            share: which of the data-parallel ranks this is.
            shares: how many there are.
        """
        size = batch // (microbatches * shares)
        for part in range(microbatches):
            first = position + (part * shares + share) * size
            yield self.rows(torch.arange(first, first + size))


def permuted(indices: torch.Tensor, epochs: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Return where a pseudo-random permutation of ``range(count)`` takes each index.

    A Feistel network over the next even power of two, whose rounds are Philox; what it takes
    outside of the range goes through it again, until it falls inside.

    Args:
        indices: int64, in ``[0, count)``.
        epochs: int64 of the same shape; each has a permutation of its own.
        count: size of the range.
        seed: of all permutations.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = (torch.tensor(seed & _LOW), torch.tensor(seed >> 32 & _LOW))
    result = indices.clone()
    outside = torch.ones_like(indices, dtype=torch.bool)
    while bool(outside.any()):
        left, right = result >> half, result & mask
        for number in range(_ROUNDS):
            counter = (right, torch.full_like(right, number), epochs & _LOW, epochs >> 32)
            mixed = philox.philox4x32(counter, key)[0] & mask
            left, right = right, left ^ mixed
        result = torch.where(outside, left << half | right, result)
        outside = result >= count
    return result
