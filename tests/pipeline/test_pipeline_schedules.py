"""Schedules, splits and timelines: pure functions, held to the formulae of the field."""

from __future__ import annotations

import itertools

import pytest

from fusedops.models import preset
from fusedops.models.parallelization.stage_costs import by_operations
from fusedops.parallel import timeline
from fusedops.parallel.comm.collectives import Log
from fusedops.parallel.pipeline.schedules import SCHEDULES, Action, ScheduleTable, table
from fusedops.parallel.pipeline.split import at, balanced, shortest

# Ranks, micro-batches, stages of a rank.
SIZES = [(1, 1, None), (2, 4, None), (3, 7, None), (4, 8, None), (2, 6, 3), (4, 8, 1)]


def _tables() -> list[ScheduleTable]:
    found = []
    for name, schedule in SCHEDULES.items():
        for ranks, microbatches, virtual in SIZES:
            if schedule.fixed and virtual is not None:
                continue
            if name == "dualpipev" and microbatches < 2 * ranks:
                continue
            if name in ("interleaved", "zero_bubble") and microbatches % max(
                1, microbatches // ranks
            ):
                continue
            found.append(table(name, ranks, microbatches, virtual))
    return found


def _name(order: ScheduleTable) -> str:
    return f"{order.schedule.name}-{order.ranks}-{order.microbatches}-{order.virtual}"


@pytest.mark.parametrize("order", _tables(), ids=_name)
def test_each_stage_does_each_microbatch_once(order: ScheduleTable) -> None:
    """Forward, input's gradient and weights' gradients, on the rank of the stage, in a right order;
    what is sent is received, in the same order on both sides."""
    places = [(stage, part) for stage in range(order.stages) for part in range(order.microbatches)]
    every = [each for rank in order.actions for each in rank]
    for kinds in ("F", "BI", "BW"):
        found = sorted((each.stage, each.microbatch) for each in every if each.kind in kinds)
        assert found == places
    for rank, actions in enumerate(order.actions):
        assert {action.stage for action in actions} == set(order.stages_of(rank))
    lists = order.with_transfers()
    for one in range(order.ranks):
        for other in range(order.ranks):
            if one != other:
                sent = _transfers(order, "send", lists[one], other)
                assert sent == _transfers(order, "receive", lists[other], one)


def _transfers(
    order: ScheduleTable, way: str, actions: tuple[Action, ...], peer: int
) -> list[tuple[str, int, int]]:
    """Return what is sent to a rank or received from it: kind, stage that uses it, micro-batch."""
    found = []
    for kind, stage, microbatch in actions:
        if kind.startswith(way):
            other = stage + (1 if kind.endswith("F") == (way == "send") else -1)
            if order.rank_of(other) == peer:
                found.append((kind[-1], other if way == "send" else stage, microbatch))
    return found


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 2), (2, 16)])
def test_activations_that_live_at_a_time(ranks: int, microbatches: int) -> None:
    assert timeline("gpipe", ranks, microbatches).alive() == [microbatches] * ranks
    wanted = [min(microbatches, ranks - rank) for rank in range(ranks)]
    assert timeline("1f1b", ranks, microbatches).alive() == wanted


def test_slow_stages_and_transfers_are_seen() -> None:
    even = timeline("1f1b", 2, 4)
    assert timeline("1f1b", 2, 4, stages=[1.0, 2.0]).bubble() > even.bubble()
    assert timeline("1f1b", 2, 4, transfer=0.5).end > even.end
    with pytest.raises(ValueError, match="stages must be 2 costs, one a stage, got 3"):
        timeline("1f1b", 2, 4, stages=[1.0] * 3)


def test_a_picture_has_a_box_for_each_action() -> None:
    found = timeline("zbv", 2, 4)
    boxes = sum(map(len, found.spans))
    assert found.svg().count("<title>") == boxes == 2 * 2 * 4 * 3
    assert f"zero bubble V: {100 * found.bubble():.1f} % bubbles" in found.svg()


def test_a_log_without_a_pipeline_is_told() -> None:
    with pytest.raises(ValueError, match="logs of a pipeline's step, got rank 3 without"):
        timeline([Log(3)])


def _dearest(costs: list[float], runs: list[range], last: float) -> float:
    sums = [sum(costs[layer] for layer in run) for run in runs]
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_split_has_a_cheaper_dearest_stage(stages: int) -> None:
    """Compared with all splits there are."""
    costs, last = [3.0, 1.0, 1.0, 4.0, 1.0, 5.0, 2.0], 3.5
    found = balanced(costs, stages, last=last)
    assert [each for run in found for each in run] == list(range(7))
    others = [at(cuts, 7, stages) for cuts in itertools.combinations(range(1, 7), stages - 1)]
    best = min(_dearest(costs, other, last) for other in others)
    assert _dearest(costs, found, last) == best


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_split_of_few_layers_has_a_shorter_step(name: str) -> None:
    """Six layers and a head worth two thirds of one: compared with all splits there are."""
    order, costs, last = table(name, 2, 8), [1.0] * 6, 0.67

    def end(runs: list[range]) -> float:
        sizes = [float(len(run)) for run in runs]
        return timeline(order, stages=[*sizes[:-1], sizes[-1] + last]).end

    every = itertools.combinations(range(1, 6), order.stages - 1)
    best = min(end(at(cuts, 6, order.stages)) for cuts in every)
    assert end(shortest(costs, order, last=last)) == best


def test_what_counts_is_the_rank_where_it_has_several_stages() -> None:
    """GPT-2's head is on the rank that has the first stage, too."""
    layers, head = by_operations(preset("gpt2"))
    order = table("zbv", 2, 8)
    runs = shortest(layers, order, last=head)
    even = balanced(layers, 4, last=head)

    def end(runs: list[range]) -> float:
        stages = [layers[0] * len(each) for each in runs]
        return timeline(order, stages=[*stages[:-1], stages[-1] + head]).end

    assert end(runs) < 0.995 * end(even)
    assert [each for run in runs for each in run] == list(range(12))


def test_a_head_takes_the_place_of_layers() -> None:
    layers, head = by_operations(preset("gpt2"))
    assert len(set(layers)) == 1
    # 39 million weights of the head beside 7 million of a layer, and its scores.
    assert 4.0 < head / layers[0] < 5.5
    runs = balanced(layers, 4, last=head)
    assert sorted(map(len, runs)) == [1, 3, 4, 4]
    assert len(runs[-1]) == 1
