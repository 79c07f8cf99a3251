"""Pipelines in plans: bubbles and live micro-batches by formulae and by the schedules' tables."""

from __future__ import annotations

import pytest

from fusedops.parallel import timeline
from fusedops.parallel.pipeline.schedules import SCHEDULES, table
from fusedops.planner import Layout, estimate, plan, preset
from fusedops.planner.pipelines import schedule_cost, stages_of_rank

GPT2 = preset("gpt2")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 32), (16, 32)])
def test_bubbles_are_those_of_the_formulae(ranks: int, microbatches: int) -> None:
    for name in ("gpipe", "1f1b"):
        found = schedule_cost(name, ranks, microbatches, 1).bubble
        assert found == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    for name, virtual in (("interleaved", 2), ("looped_bfs", 2), ("interleaved", 3)):
        found = schedule_cost(name, ranks, microbatches, virtual).bubble
        assert found == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (2, 24), (4, 32), (4, 10)])
def test_what_is_read_off_a_short_table_holds_for_a_long_one(
    name: str, ranks: int, microbatches: int
) -> None:
    virtual = SCHEDULES[name].virtual
    line = timeline(table(name, ranks, microbatches))
    found = schedule_cost(name, ranks, microbatches, virtual)
    assert found.bubble == pytest.approx(line.bubble())
    assert list(found.in_flight) == line.alive()


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_have_the_stages_of_the_table(name: str) -> None:
    order = table(name, 4, 8)
    for rank in range(4):
        assert stages_of_rank(name, 4, order.virtual, rank) == order.stages_of(rank)


def test_plans_propose_schedules_with_the_smallest_bubble_first() -> None:
    given = {"tp": (1,), "pp": (2,), "zero": (0,), "recompute": ("none",), "offload": ((),)}
    base = Layout.of(precision="float32", microbatches=8)
    found = plan(GPT2, 2, 64 << 30, base, **given)
    layouts = [row.layout for row in found.rows]
    assert [layout.parallel.pipeline_schedule for layout in layouts] == [
        "zbv",
        "zero_bubble",
        "interleaved",
        "1f1b",
    ]
    assert found.advice == "take the first: pp 2 (zbv)"
    bubbles = [layout.bubble for layout in layouts]
    assert bubbles == sorted(bubbles) and bubbles[-1] == pytest.approx(1 / 9)
    every = plan(GPT2, 2, 64 << 30, base, **given, schedule=tuple(SCHEDULES))
    assert {row.layout.parallel.pipeline_schedule for row in every.rows} == SCHEDULES.keys()
    # What a rank keeps is what the schedule lets live.
    kept = {
        row.layout.parallel.pipeline_schedule: row.estimate.parts["activations"]
        for row in every.rows
    }
    assert kept["gpipe"] > kept["interleaved"] > kept["1f1b"]


def test_a_rank_with_both_ends_has_the_words_once() -> None:
    line = Layout.of(pp=2, precision="float32", microbatches=8, pipeline_balance="layers")
    straight = estimate(GPT2, line)
    turned = estimate(GPT2, line.replace(pipeline_schedule="zbv"))
    layers = sum(GPT2.layer(index).total for index in range(6))
    assert (straight.stage, turned.stage) == (1, 0)
    assert straight.weights == 4 * (layers + GPT2.output(own_weight=True).total)
    assert turned.weights == 4 * (layers + GPT2.embedding().total + GPT2.output().total)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "looped_bfs", "zbv", "dualpipev"])
def test_many_microbatches_cost_what_a_few_of_the_same_remainder_do(name: str) -> None:
    ranks, microbatches, virtual = 3, 31, SCHEDULES[name].virtual
    line = timeline(table(name, ranks, microbatches, virtual))
    found = schedule_cost(name, ranks, microbatches, virtual)
    assert found.bubble == pytest.approx(1 - 3 * virtual * microbatches / line.end)
    assert found.in_flight == pytest.approx(line.alive())
    # Their number is no matter of time: a table of all of them would take minutes.
    assert 0 < schedule_cost(name, ranks, 1_000_003, virtual).bubble < found.bubble
