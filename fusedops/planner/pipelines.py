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


class Pipelined(NamedTuple):
    """What a schedule costs.

    Attributes:
        bubble: the share of all ranks' time in which they compute nothing.
        alive: of each rank, of how many micro-batches it keeps what its layers save, at most.
    """

    bubble: float
    alive: tuple[float, ...]


@cache
def pipelined(name: str, ranks: int, microbatches: int, virtual: int) -> Pipelined:
    """Return what a schedule costs.

    Args:
        name: of ``SCHEDULES``.
        ranks: of the pipeline.
        microbatches: of a step.
        virtual: stages of a rank.

    Raises:
        ValueError: it does not exist for these sizes.

    Example:
        >>> from fusedops.planner.pipelines import pipelined
        >>> pipelined("1f1b", ranks=4, microbatches=8, virtual=1).alive
        (4.0, 3.0, 2.0, 1.0)
    """
    rest = microbatches % ranks
    timed = microbatches
    if not rest or name not in _WHOLE_ROUNDS:
        timed = min(microbatches, _ROUNDS * ranks + rest)
    line = timeline(table(name, ranks, timed, virtual))
    work = 3 * virtual  # of a micro-batch on a rank
    lost = line.end - work * timed
    alive = line.alive()
    if name in _KEEP_ALL:
        alive = [each * microbatches / timed for each in alive]
    return Pipelined(lost / (work * microbatches + lost), tuple(alive))


def places(name: str, ranks: int, virtual: int, rank: int) -> list[int]:
    """Return which of all stages a rank has.

    Args:
        name: of ``SCHEDULES``.
        ranks: of the pipeline.
        virtual: stages of a rank.
        rank: of which.
    """
    laps = range(virtual)
    turns = SCHEDULES[name].is_v
    return [lap * ranks + (ranks - 1 - rank if turns and lap % 2 else rank) for lap in laps]
