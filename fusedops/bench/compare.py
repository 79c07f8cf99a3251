"""Two records against each other: what became slower beyond its spread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusedops.bench.results import BenchRecord, BenchRow
from fusedops.terminal.files import UserError

# What must agree before two times may be compared: the reader's word -> where it stands.
_MUST_AGREE = {
    "machine": ("machine", "name"),
    "device": ("machine", "device"),
    "threads": ("machine", "threads"),
    "allocator": ("settings", "allocator"),
}


@dataclass(frozen=True)
class RowChange:
    """A row that both records have."""

    before: BenchRow  # the row of the first record
    after: BenchRow  # the row of the second

    @property
    def slower_by(self) -> float:
        """How much longer it takes now, as a share; negative when it became faster."""
        return self.after.median_us / self.before.median_us - 1.0

    @property
    def beyond_spread(self) -> bool:
        """Whether the middle halves of the two measurements do not touch."""
        if self.slower_by > 0:
            return self.after.q1_us > self.before.q3_us
        return self.after.q3_us < self.before.q1_us

    @property
    def trusted(self) -> bool:
        """Whether both measurements had enough undisturbed samples."""
        return self.before.trusted and self.after.trusted


@dataclass(frozen=True)
class RecordComparison:
    """The outcome of a comparison."""

    changes: tuple[RowChange, ...]  # all rows that both records have
    slower: tuple[RowChange, ...]  # those of fusedops that became slower than allowed
    faster: tuple[RowChange, ...]  # those of fusedops that became faster by as much
    # those that moved as much but were disturbed while measured: not judged
    doubtful: tuple[RowChange, ...]
    missing: tuple[tuple[str, ...], ...]  # keys of rows that only the first record has
    drift: float  # median change of the rows that are not ours: of the machine, not of fusedops


def parse_share(text: str) -> float:
    """Return ``"5%"`` or ``"0.05"`` as 0.05.

    Raises:
        UserError: when it is neither.
    """
    percent = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise UserError(f"--fail-if-slower must be a share such as 5% or 0.05, got {text!r}")
    return value / 100 if percent else value


def compare(
    before: BenchRecord, after: BenchRecord, *, allowed: float, allow_different: bool = False
) -> RecordComparison:
    """Match the rows of two records and judge those of fusedops in the second one.

    ``allowed`` is the share by which a row may be slower; ``allow_different`` compares although
    machine, settings or dtype differ.

    Raises:
        UserError: when they must not be compared, or have no row in common.
    """
    if not allow_different:
        _check_alike(before, after)
    old, new = _by_key(before.rows), _by_key(after.rows)
    if allow_different and not old.keys() & new.keys():
        old, new = _by_key(_without_dtype(before)), _by_key(_without_dtype(after))
    changes = tuple(RowChange(old[key], new[key]) for key in old if key in new)
    if not changes:
        raise UserError(
            "the two records have no row in common: measure the same ops and sizes twice"
        )
    ours = [change for change in changes if change.after.ours and change.beyond_spread]
    moved = [change for change in ours if abs(change.slower_by) > allowed]
    theirs = sorted(change.slower_by for change in changes if not change.after.ours)
    return RecordComparison(
        changes,
        slower=tuple(change for change in moved if change.trusted and change.slower_by > 0),
        faster=tuple(change for change in moved if change.trusted and change.slower_by < 0),
        doubtful=tuple(change for change in moved if not change.trusted),
        missing=tuple(key for key in old if key not in new),
        drift=theirs[len(theirs) // 2] if theirs else 0.0,
    )


def _check_alike(before: BenchRecord, after: BenchRecord) -> None:
    pairs = [
        (word, *(getattr(record, part).get(key) for record in (before, after)))
        for word, (part, key) in _MUST_AGREE.items()
    ]
    dtypes = [{row.dtype for row in record.rows} for record in (before, after)]
    if not dtypes[0] & dtypes[1]:
        pairs.append(("dtype", *(", ".join(sorted(names)) or "none" for names in dtypes)))
    for word, one, two in pairs:
        if one != two:
            raise UserError(
                f"the records differ in {word} ({one} and {two}): their times say nothing about "
                "the code; --allow-different compares them all the same"
            )


def _by_key(rows: Iterable[BenchRow]) -> dict[tuple[str, ...], BenchRow]:
    return {row.key: row for row in rows}


def _without_dtype(record: BenchRecord) -> list[BenchRow]:
    """Return the rows of a record of one dtype under a common one; others have no match."""
    if len({row.dtype for row in record.rows}) > 1:
        return []
    return [replace(row, dtype="") for row in record.rows]
