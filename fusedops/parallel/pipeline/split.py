"""Which layers a stage of a pipeline gets: by their costs, or where the user cuts.

A pipeline runs at about the pace of its slowest rank. ``balanced`` minimizes the cost of the
slowest stage; what that is worth depends on the schedule, above all where a rank has several
stages, so ``shortest`` continues from there by the time of a step. What follows the last layer
belongs to the last stage: ``last`` is its cost, in the unit of ``costs``, those of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from fusedops._core import checks
from fusedops.parallel.pipeline.schedules import ScheduleTable
from fusedops.parallel.pipeline.timeline import timeline

# Actions that are timed to find a split; about a second.
_TIMED = 100_000


def balanced(costs: Sequence[float], stages: int, *, last: float = 0.0) -> list[range]:
    """Return runs of layers, at least one each, whose slowest is as fast as any split's can be.

    Raises:
        ValueError: there are fewer layers than stages.

    Note:
        Of several such splits, the one with the least sum of squares that dynamic programming
        finds.
    """
    layers = len(costs)
    check_layers("balanced", layers, stages)
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (last if end == layers else 0.0)

    # best[end]: of the layers before `end` in so many stages: slowest stage, sum of squares, cuts.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        after = stages - stage - 1
        ends = [layers] if not after else range(stage + 1, layers - after + 1)
        best = {end: _last_run(best, end, cost) for end in ends}
    return _runs(best[layers][2])


def _last_run(
    best: dict[int, tuple[float, float, tuple[int, ...]]],
    end: int,
    cost: Callable[[int, int], float],
) -> tuple[float, float, tuple[int, ...]]:
    """Return the best split of the layers before ``end``, of the best ones with a stage less."""
    least: tuple[float, float, tuple[int, ...]] = (inf, inf, ())
    for begin in reversed([begin for begin in best if begin < end]):
        own = cost(begin, end)
        if own > least[0]:
            break  # longer runs cost more
        slowest, squares, cuts = best[begin]
        least = min(least, (max(slowest, own), squares + own**2, (*cuts, end)))
    return least


def shortest(costs: Sequence[float], order: ScheduleTable, *, last: float = 0.0) -> list[range]:
    """Return runs of layers with which a schedule's step is short.

    Raises:
        ValueError: there are fewer layers than stages.

    Note:
        Starts from the split with the fastest slowest stage. Then a layer moves from one stage to
        another, shifting those between, for as long as the ``timeline`` gets shorter: no such move
        makes it shorter, unless there are so many stages and micro-batches that the search would
        take seconds.
    """
    left = _TIMED // sum(map(len, order.actions))

    def rating(cuts: tuple[int, ...]) -> tuple[float, float]:
        stages = [sum(costs[layer] for layer in run) for run in _runs(cuts)]
        stages[-1] += last
        return timeline(order, stages=stages).end, max(stages)

    start = balanced(costs, order.stages, last=last)
    cuts = tuple(run.stop for run in start)
    best = rating(cuts)
    while left > 0:
        others = _moves(cuts)[:left]
        left -= len(others)
        rated, other = min(((rating(move), move) for move in others), default=(best, cuts))
        if rated >= best:
            break
        best, cuts = rated, other
    return _runs(cuts)


def _runs(cuts: Sequence[int]) -> list[range]:
    """Return the runs that end at these layers."""
    return [range(a, b) for a, b in zip((0, *cuts), cuts, strict=False)]


def _moves(cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the cuts after a layer has moved from one stage to another, to near ones first."""
    stages = range(len(cuts))
    pairs = [(a, b) for a in stages for b in stages if a != b]
    pairs.sort(key=lambda pair: abs(pair[0] - pair[1]))
    sizes = [len(run) for run in _runs(cuts)]
    return [
        tuple(
            cut + (min(a, b) <= i < max(a, b)) * (1 if b < a else -1) for i, cut in enumerate(cuts)
        )
        for a, b in pairs
        if sizes[a] > 1
    ]


def at(starts: Sequence[int], layers: int, stages: int, op: str = "pipeline") -> list[range]:
    """Return the runs of layers between cuts, the first layers of the later stages.

    Raises:
        ValueError: the cuts do not make that many runs of layers that exist.
    """
    bounds = [0, *starts, layers]
    ascending = all(a < b for a, b in zip(bounds, bounds[1:], strict=False))
    if len(starts) != stages - 1 or not ascending:
        even = balanced([1.0] * layers, stages)
        hint = f" ({tuple(run.start for run in even[1:])} would fit)"
        expected = f"{stages - 1} first layers between 1 and {layers - 1}, in ascending order"
        checks.fail(op, "pipeline_cuts", expected, f"{tuple(starts)}{hint}")
    return _runs(bounds[1:])


def check_layers(
    op: str, layers: int, stages: int, virtual: int = 1, *, fixed: bool = False
) -> None:
    """Raise unless each of the stages of all ranks can have a layer.

    ``virtual`` are the stages of a rank, ``fixed`` if the schedule exists for no other number.
    """
    if layers >= stages:
        return
    ranks = stages // virtual
    fits = []
    if layers >= 2 * virtual or virtual == 1:  # a single rank has no stages
        fits.append(f"pp {layers // virtual}")
    if virtual > 1 and layers >= ranks:
        one_each = "pipeline_schedule '1f1b'"
        fits.append(one_each if fixed else f"pipeline_virtual {layers // ranks}")
    hint = f" ({' or '.join(fits)} would fit)" if fits else ""
    expected = f"at most the {layers} layers"
    checks.fail(op, "stages, pp x pipeline_virtual", expected, f"{stages}{hint}")
