"""Which scores each rank computes with whose keys, and which keys are sent. Numbers, no tensors.

A rank's queries attend the keys of each rank in blocks: a rectangle of which a diagonal band is
computed. A block is a call of ``fusedops.attention``, aligned to the upper left, or, where blocks
of several documents are alike, a part of one call of ``fusedops.attention_varlen``. What no query
of a rank may attend is not sent to it: half of what a causal zigzag could send, and most of what
is beyond a window or in another document.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import NamedTuple

from fusedops.parallel.context.layout import Piece, Range, SequenceLayout, merged, pieces


class ContextPattern(NamedTuple):
    """Who may attend whom: query at ``i``, key at ``j`` if ``-left <= j - i <= right``."""

    left: int  # -1 is unbounded
    right: int  # -1 is unbounded; 0 is causal
    placed: bool = False  # whether scores depend on the distance too (ALiBi)


class AttentionBlock(NamedTuple):
    """A rectangle of scores."""

    rows: Range  # of the queries, among the tokens of their rank
    columns: Range  # of the keys, likewise; in a ``Step`` among those that were sent
    left: int  # bounds of ``column - row``, both counted from the block's corner; -1 is unbounded
    right: int  # likewise
    distance: int  # position of the first query minus that of the first key

    @property
    def scores(self) -> int:
        """Number of scores that are computed."""
        height, width = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        left = height if self.left < 0 else self.left
        right = width if self.right < 0 else self.right
        return sum(
            max(0, min(width, row + right + 1) - max(0, row - left)) for row in range(height)
        )


class ContextCall(NamedTuple):
    """Blocks of one kind whose rows do not overlap."""

    blocks: tuple[AttentionBlock, ...]

    @property
    def rows(self) -> tuple[Range, ...]:
        """The rows of the blocks one after another; neighbours are one range."""
        return merged(tuple(block.rows for block in self.blocks))

    @property
    def columns(self) -> tuple[Range, ...]:
        """The columns of the blocks one after another; neighbours are one range."""
        return merged(tuple(block.columns for block in self.blocks))


class Step(NamedTuple):
    """What one rank does with the keys of one rank."""

    columns: tuple[Range, ...]  # the keys that are sent, among the tokens of their rank
    calls: tuple[ContextCall, ...]  # with columns counted among the keys that are sent

    @property
    def tokens(self) -> int:
        """Number of keys that are sent."""
        return sum(stop - start for start, stop in self.columns)

    @property
    def scores(self) -> int:
        """Number of scores that are computed."""
        return sum(block.scores for call in self.calls for block in call.blocks)


@functools.lru_cache(maxsize=256)
def step(layout: SequenceLayout, pattern: ContextPattern, rank: int, source: int) -> Step:
    """Return what ``rank`` does with the keys of ``source``."""
    of_source = {
        document: list(group)
        for document, group in groupby(pieces(layout, source), lambda piece: piece.document)
    }
    bounded = pattern.placed or pattern.left >= 0 or pattern.right > 0
    alike: list[AttentionBlock] = []
    calls: list[ContextCall] = []
    for document, group in groupby(pieces(layout, rank), lambda piece: piece.document):
        queries, keys = list(group), of_source.get(document, [])
        if not bounded:
            alike += _staircase(queries, keys, pattern.right, rank == source)
            continue
        for query in queries:
            for key in keys:
                block = _band(query, key, pattern)
                if block is None:
                    continue
                if block.distance == 0:
                    alike.append(block)
                else:
                    calls.append(ContextCall((block,)))
    if alike:
        calls.insert(0, ContextCall(tuple(alike)))
    return _compact(calls)


def _staircase(
    queries: list[Piece], keys: list[Piece], right: int, here: bool
) -> Iterator[AttentionBlock]:
    """Yield the blocks of one document where positions matter for causality alone.

    Its tokens are contiguous on each rank, in rising order: the keys before a query come first.
    """
    if not keys:
        return
    first = keys[0].local
    if here or right < 0:
        rows = queries[0].local, queries[-1].local + _size(queries[-1])
        yield AttentionBlock(rows, (first, keys[-1].local + _size(keys[-1])), -1, right, 0)
        return
    blocks: list[AttentionBlock] = []
    for query in queries:
        before = sum(_size(key) for key in keys if key.start < query.start)
        rows, columns = (query.local, query.local + _size(query)), (first, first + before)
        if blocks and blocks[-1].columns == columns:
            blocks[-1] = blocks[-1]._replace(rows=(blocks[-1].rows[0], rows[1]))
        elif before:
            blocks.append(AttentionBlock(rows, columns, -1, -1, 0))
    yield from blocks


def _band(query: Piece, key: Piece, pattern: ContextPattern) -> AttentionBlock | None:
    """Return the part of a rectangle that is computed, ``None`` where nothing is."""
    rows, columns, distance = _size(query), _size(key), query.start - key.start
    row = column = 0
    if distance == 0:  # the same tokens; blocks of one kind are one call
        here = (query.local, query.local + rows)
        return AttentionBlock(here, here, pattern.left, pattern.right, 0)
    # Counted from the corner, column - row is in [low, high].
    low = distance - pattern.left if pattern.left >= 0 else -rows
    high = distance + pattern.right if pattern.right >= 0 else columns
    if high < 0:  # the first rows attend nothing
        row, low, high = -high, low - high, 0
    if low > 0:  # the first columns are attended by none
        column, low, high = low, 0, high - low
    rows, columns = rows - row, columns - column
    rows, columns = min(rows, columns - low), min(columns, rows + high)
    if rows <= 0 or columns <= 0 or high < 0:
        return None
    return AttentionBlock(
        (query.local + row, query.local + row + rows),
        (key.local + column, key.local + column + columns),
        -low if -low < rows - 1 else -1,
        high if high < columns - 1 else -1,
        distance + row - column,
    )


def _size(piece: Piece) -> int:
    return piece.stop - piece.start


def _compact(calls: list[ContextCall]) -> Step:
    """Return the step of these calls, with the columns that they need and no others."""
    cuts: list[Range] = []
    for start, stop in sorted(block.columns for call in calls for block in call.blocks):
        if cuts and start < cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(stop, cuts[-1][1]))
        else:
            cuts.append((start, stop))
    columns = merged(cuts)
    starts = [start for start, _ in columns]
    sizes = [stop - start for start, stop in columns]
    before = [0, *accumulate(sizes)]

    def moved(block: AttentionBlock) -> AttentionBlock:
        index = bisect_right(starts, block.columns[0]) - 1
        shift = before[index] - starts[index]
        return block._replace(columns=(block.columns[0] + shift, block.columns[1] + shift))

    return Step(columns, tuple(ContextCall(tuple(map(moved, call.blocks))) for call in calls))
