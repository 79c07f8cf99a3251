"""What a pipeline's schedule costs, read off its own table: time that is lost, micro-batches kept.

Forward, the gradient of a stage's input and those of its weights count as one unit of time each, as
in the pictures of ``docs/pipeline.md``. For GPipe, 1F1B and the interleaved schedule that gives the
formulae of the field; the others have none that holds for all sizes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fusedops.parallel.pipeline.schedules import SCHEDULES, table
from fusedops.parallel.pipeline.timeline import timeline

# From so many micro-batches a rank on, what is lost and what is kept depend on the remainder alone.
_ROUNDS = 4
# But for these, which keep all.
_KEEP_ALL = ("gpipe", "looped_bfs")
# Of these, numbers of micro-batches that the ranks do not divide are few and small.
_WHOLE_ROUNDS = ("interleaved", "zero_bubble")


class ScheduleCost(NamedTuple):
    """What a schedule costs."""

    bubble: float  # the share of all ranks' time in which they compute nothing
    # Of each rank, of how many micro-batches it keeps what its layers save, at most
    in_flight: tuple[float, ...]


@cache
def schedule_cost(name: str, ranks: int, microbatches: int, virtual: int) -> ScheduleCost:
    """Return the cost of a schedule of ``SCHEDULES``."""
    remainder = microbatches % ranks
    timed = microbatches
    if not remainder or name not in _WHOLE_ROUNDS:
        timed = min(microbatches, _ROUNDS * ranks + remainder)
    line = timeline(table(name, ranks, timed, virtual))
    work = 3 * virtual  # of a micro-batch on a rank
    lost = line.end - work * timed
    in_flight = line.alive()
    if name in _KEEP_ALL:
        in_flight = [count * microbatches / timed for count in in_flight]
    return ScheduleCost(lost / (work * microbatches + lost), tuple(in_flight))


def stages_of_rank(name: str, ranks: int, virtual: int, rank: int) -> list[int]:
    """Return the stages of a rank."""
    is_v = SCHEDULES[name].is_v
    return [
        chunk * ranks + (ranks - 1 - rank if is_v and chunk % 2 else rank)
        for chunk in range(virtual)
    ]
