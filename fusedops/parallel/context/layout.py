"""Which tokens of a sequence each rank of a context-parallel group holds. No process takes part.

Tokens are counted through a batch: row ``b`` of ``length`` tokens begins at ``b * length``. A
document begins with each row at the latest; ``ends`` has where each ends, from 0 on, like
``cu_seqlens``. Whatever the layout, a rank holds equally many tokens of each row, in rising order,
so that the tokens of one document lie side by side on each rank.

    contiguous   | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |     a row of 16 tokens on 4 ranks
    zigzag       | 0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0 |
    document     | 0 1 2 3 3 2 1 0 | 0 1 2 3 3 2 1 0 |         two documents of 8 tokens

With causal attention a token costs as much as there are tokens before it: contiguous shards give
the last rank almost twice the average, zigzag gives every rank the same. Documents that are much
shorter than the row are best cut by ``document`` where balance matters more than the keys that
then move, and by ``zigzag`` or ``contiguous``, which leave most of them whole, where it does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fusedops._core import checks

BALANCES = ("zigzag", "document", "contiguous")

Range = tuple[int, int]


class SequenceLayout(NamedTuple):
    """A batch of sequences over the ranks of a group.

    Attributes:
        length: tokens of a row, all ranks together.
        ranks: of the group.
        balance: one of ``BALANCES``.
        ends: where documents end, counted through the batch, from 0 on.
    """

    length: int
    ranks: int
    balance: str
    ends: tuple[int, ...]

    @property
    def share(self) -> int:
        """Tokens of a row on each rank."""
        return self.length // self.ranks

    @property
    def complete_rows(self) -> bool:
        """Whether each row is one document."""
        return self.ends == tuple(range(0, self.ends[-1] + 1, self.length or 1))


class Piece(NamedTuple):
    """Tokens of one document that follow each other, and where a rank has them.

    Attributes:
        document: its number.
        start: the first, counted through the batch.
        stop: behind the last.
        local: the place of the first among the tokens of the rank.
    """

    document: int
    start: int
    stop: int
    local: int


def layout_of(
    op: str,
    length: int,
    ranks: int,
    balance: str,
    ends: Sequence[int] | None = None,
    rows: int = 1,
) -> SequenceLayout:
    """Return the layout of ``rows`` rows; raise for what cannot be cut so.

    Args:
        op: the function's name, for messages.
        length: tokens of a row, all ranks together.
        ranks: of the group.
        balance: one of ``BALANCES``.
        ends: of the documents; ``None``: each row is one.
        rows: of the batch.
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
            wanted = f"such that a document begins with each row of {length} tokens"
            checks.fail(op, "cu_seqlens", wanted, f"one from {before} to {after}")
    return SequenceLayout(length, ranks, balance, cuts)


@functools.lru_cache(maxsize=256)
def ranges(layout: SequenceLayout, rank: int) -> tuple[Range, ...]:
    """Return the tokens of a rank as ranges, counted through the batch, rising."""
    total = layout.ends[-1]
    cuts: list[Range] = []
    if layout.balance == "document":
        turn = 0
        for start, stop in zip(layout.ends, layout.ends[1:], strict=False):
            cuts += mirrored(start, stop, layout.ranks, rank, turn)
            turn = (turn + stop - start) % layout.ranks
    else:
        for row in range(0, total, max(1, layout.length)):
            if layout.balance == "zigzag":
                cuts += mirrored(row, row + layout.length, layout.ranks, rank)
            else:
                cuts.append((row + rank * layout.share, row + (rank + 1) * layout.share))
    return merged(cuts)


def merged(cuts: Sequence[Range]) -> tuple[Range, ...]:
    """Return ranges without empty ones, those that follow each other joined."""
    found: list[Range] = []
    for start, stop in cuts:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def mirrored(start: int, stop: int, ranks: int, rank: int, turn: int = 0) -> list[Range]:
    """Return a rank's two ranges of ``2 * ranks``: that of its number, and its mirror image.

    What does not divide goes to the ranks from ``turn`` on, one token each.
    """
    whole, rest = divmod(stop - start, ranks)
    shares = [whole + ((each - turn) % ranks < rest) for each in range(ranks)]
    low, high = [(each + 1) // 2 for each in shares], [each // 2 for each in shares]
    first = start + sum(low[:rank])
    second = start + sum(low) + sum(high[rank + 1 :])
    return [(first, first + low[rank]), (second, second + high[rank])]


def order(layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """Return the numbers of the ranks' tokens, those of rank 0 first, counted through the batch."""
    cuts = [each for rank in range(layout.ranks) for each in ranges(layout, rank)]
    starts, stops = torch.tensor(cuts, dtype=torch.int64).view(-1, 2).unbind(1)
    sizes = stops - starts
    firsts = (starts - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    return (firsts + torch.arange(len(firsts))).to(device)


def order_back(layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """Return where each token of the batch stands in ``order``."""
    return torch.argsort(order(layout, device))


@functools.lru_cache(maxsize=256)
def places(layout: SequenceLayout, rank: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of a rank's tokens, counted through the batch; the same for all layers.

    Operators alone may ask: what is kept must be real.
    """
    cuts = [torch.arange(*each) for each in ranges(layout, rank)]
    return torch.cat([torch.arange(0), *cuts]).to(device)


@functools.lru_cache(maxsize=256)
def pieces(layout: SequenceLayout, rank: int) -> tuple[Piece, ...]:
    """Return the ranges of a rank, cut where documents end."""
    return tuple(_pieces(layout, rank))


def _pieces(layout: SequenceLayout, rank: int) -> Iterator[Piece]:
    ends, document, local = layout.ends, 0, 0
    for start, stop in ranges(layout, rank):
        while start < stop:
            while ends[document + 1] <= start:
                document += 1
            until = min(stop, ends[document + 1])
            yield Piece(document, start, until, local)
            local += until - start
            start = until
