"""Which tokens of a sequence each rank of a context-parallel group has. Nothing is communicated.

Tokens are counted through a batch: row ``b`` of ``length`` tokens begins at ``b * length``. A
document begins with each row at the latest; ``ends`` has where each ends, from 0 on, like
``cu_seqlens``. In every layout a rank has equally many tokens of each row, in rising order, so that
the tokens of one document are contiguous on each rank.

    contiguous   | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |     a row of 16 tokens on 4 ranks
    zigzag       | 0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0 |
    document     | 0 1 2 3 3 2 1 0 | 0 1 2 3 3 2 1 0 |         two documents of 8 tokens

With causal attention a token costs as much as there are tokens before it: contiguous shards give
the last rank almost twice the average, zigzag gives every rank the same. For documents that are
much shorter than the row ``document`` has the best balance, and ``zigzag`` and ``contiguous``,
which leave most of them on one rank, send fewer keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusedops._core import checks
from fusedops._core.device_tensors import to_device

BALANCES = ("zigzag", "document", "contiguous")

Range = tuple[int, int]


class SequenceLayout(NamedTuple):
    """A batch of sequences over the ranks of a group."""

    length: int  # tokens of a row, all ranks together
    ranks: int  # of the group
    balance: str  # one of ``BALANCES``
    ends: tuple[int, ...]  # where documents end, counted through the batch, from 0 on

    @property
    def share(self) -> int:
        """Tokens of a row on each rank."""
        return self.length // self.ranks

    @property
    def complete_rows(self) -> bool:
        """Whether each row is one document."""
        return self.ends == tuple(range(0, self.ends[-1] + 1, self.length or 1))


class Piece(NamedTuple):
    """Tokens of one document that follow each other, and where a rank has them."""

    document: int  # its number
    start: int  # the first, counted through the batch
    stop: int  # behind the last
    local: int  # the place of the first among the tokens of the rank


def layout_of(
    op: str,
    length: int,
    ranks: int,
    balance: str,
    ends: Sequence[int] | None = None,
    rows: int = 1,
) -> SequenceLayout:
    """Return the layout of ``rows`` rows; raise for what cannot be sharded so.

    ``length`` is the tokens of a row, all ranks together. Without ``ends`` each row is a document.
    """
    checks.choice(op, "balance", balance, BALANCES)
    if length % ranks:
        checks.fail(op, "the sequence", f"of a length that {ranks} ranks divide", length)
    total = rows * length
    if ends is None:
        return SequenceLayout(length, ranks, balance, tuple(range(0, total + 1, length or 1)))
    cuts = tuple(ends)
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != total:
        shown = f"{list(cuts[:1])} to {list(cuts[-1:])}"
        checks.fail(op, "cu_seqlens", f"from 0 to {total}, the tokens of all ranks", shown)
    for before, after in zip(cuts, cuts[1:], strict=False):
        if after < before:
            checks.fail(op, "cu_seqlens", "monotone", f"{before} before {after}")
        if after > before and (after - 1) // length != before // length:
            expected = f"such that a document begins with each row of {length} tokens"
            checks.fail(op, "cu_seqlens", expected, f"one from {before} to {after}")
    return SequenceLayout(length, ranks, balance, cuts)


@functools.lru_cache(maxsize=256)
def ranges(layout: SequenceLayout, rank: int) -> tuple[Range, ...]:
    """Return the tokens of a rank as ranges, counted through the batch, rising."""
    total = layout.ends[-1]
    cuts: list[Range] = []
    if layout.balance == "document":
        first_rank = 0
        for start, stop in zip(layout.ends, layout.ends[1:], strict=False):
            cuts += mirrored(start, stop, layout.ranks, rank, first_rank)
            first_rank = (first_rank + stop - start) % layout.ranks
    else:
        for row in range(0, total, max(1, layout.length)):
            if layout.balance == "zigzag":
                cuts += mirrored(row, row + layout.length, layout.ranks, rank)
            else:
                cuts.append((row + rank * layout.share, row + (rank + 1) * layout.share))
    return merged(cuts)


def merged(cuts: Sequence[Range]) -> tuple[Range, ...]:
    """Return ranges without empty ones, those that follow each other joined."""
    joined: list[Range] = []
    for start, stop in cuts:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def mirrored(start: int, stop: int, ranks: int, rank: int, first_rank: int = 0) -> list[Range]:
    """Return a rank's two ranges of ``2 * ranks``: that of its number, and its mirror image.

    What does not divide goes to the ranks from ``first_rank`` on, one token each.
    """
    least, rest = divmod(stop - start, ranks)
    shares = [least + ((other - first_rank) % ranks < rest) for other in range(ranks)]
    low, high = [(share + 1) // 2 for share in shares], [share // 2 for share in shares]
    first = start + sum(low[:rank])
    second = start + sum(low) + sum(high[rank + 1 :])
    return [(first, first + low[rank]), (second, second + high[rank])]


def order(layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """Return the numbers of the ranks' tokens, those of rank 0 first, counted through the batch."""
    cuts = [cut for rank in range(layout.ranks) for cut in ranges(layout, rank)]
    starts, stops = torch.tensor(cuts, dtype=torch.int64).view(-1, 2).unbind(1)
    sizes = stops - starts
    firsts = (starts - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    return to_device(firsts + torch.arange(len(firsts)), device)


def order_back(layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """Return the index of each token of the batch in ``order``."""
    return torch.argsort(order(layout, device))


@functools.lru_cache(maxsize=256)
def places(layout: SequenceLayout, rank: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of a rank's tokens, counted through the batch; cached for all layers.

    Only operators may call it: what is cached must be real.
    """
    cuts = [torch.arange(*cut) for cut in ranges(layout, rank)]
    return to_device(torch.cat([torch.arange(0), *cuts]), device)


@functools.lru_cache(maxsize=256)
def pieces(layout: SequenceLayout, rank: int) -> tuple[Piece, ...]:
    """Return the ranges of a rank, cut where documents end."""
    cut: list[Piece] = []
    ends, document, local = layout.ends, 0, 0
    for start, stop in ranges(layout, rank):
        while start < stop:
            while ends[document + 1] <= start:
                document += 1
            until = min(stop, ends[document + 1])
            cut.append(Piece(document, start, until, local))
            local += until - start
            start = until
    return tuple(cut)
