"""Layouts that cannot be, what a layout changes in the bytes of a device, pipelines in plans."""

from __future__ import annotations

import doctest
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from fusedops import UnsupportedError, checkpoint, models, planner
from fusedops.models import ParallelConfig, TransformerConfig
from fusedops.parallel import timeline
from fusedops.parallel.pipeline.schedules import SCHEDULES, table
from fusedops.planner import (
    Layout,
    check,
    estimate,
    fastest,
    load_device,
    parse_bytes,
    plan,
    preset,
    search,
    step_shape,
)
from fusedops.planner.pipelines import schedule_cost, stages_of_rank
from fusedops.planner.search import describe
from fusedops.terminal import sizes

PANGU = preset("pangu-13b")
MIXTRAL = preset("mixtral-8x7b")
INTERLEAVED = {"pp": 4, "pipeline_schedule": "interleaved", "microbatches": 4}


@pytest.mark.parametrize(
    ("model", "sizes", "devices", "says"),
    [
        (PANGU, {"dp": 2, "tp": 3}, 8, "dp x tp x pp x cp = 2 x 3 x 1 x 1 = 6 must be the 8"),
        (PANGU, {"dp": 2, "tp": 2}, 8, "dp 4 or tp 4 or pp 2 or cp 2 would fit"),
        (PANGU, {"tp": 3}, 3, "divisor of the heads, 40, got 3 (2, 4, 5, 8 would fit)"),
        (PANGU, {"pp": 41}, 41, "stages, pp x pipeline_virtual must be at most the 40 layers"),
        (PANGU, {"ep": 2, "dp": 2}, 2, "ep must be 1 for a model without experts, got 2"),
        (MIXTRAL, {"ep": 3, "dp": 3}, 3, "ep must be a divisor of the 8 experts, got 3"),
        (MIXTRAL, {"ep": 4, "dp": 2}, 2, "ep must be a divisor of dp x cp = 2, inside of which"),
        (PANGU, {"tp": 8, "sp": True, "seq_len": 1020}, 8, "the tokens of a device (sp), 1020"),
        (PANGU, {"cp": 3}, 3, "cp must be a divisor of the tokens of a sequence, 1024, got 3"),
        (PANGU, INTERLEAVED | {"pipeline_virtual": 11}, 4, "virtual 10 would fit"),
        (PANGU, {"seq_len": 2048}, 1, "seq_len must be at most 1024, the positions that the model"),
    ],
    ids=lambda value: str(value) if isinstance(value, (dict, int)) else "",
)
def test_sizes_that_do_not_fit_are_told_with_those_that_would(
    model: TransformerConfig, sizes: dict[str, Any], devices: int, says: str
) -> None:
    with pytest.raises(ValueError) as error:
        check(model, Layout.of(**sizes), devices)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("32GiB", 32 << 30), ("80 GB", 80 * 10**9), ("1024B", 1024), ("1.5gib", 3 << 29)]
    + [(".5kB", 500)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (".5k", "unit 'k' is not known"),
        ("-3GiB", "is not a size"),
        ("0GiB", "more than 0 bytes"),
        ("9" * 400 + "GB", "no such number of bytes"),
    ],
)
def test_sizes_that_are_none_are_told(text: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_bytes(text)
    assert says in str(error.value)


def test_each_stage_of_zero_divides_one_part_more() -> None:
    one = Layout.of(dp=8)
    found = [estimate(PANGU, one.replace(zero=stage)) for stage in range(4)]
    count = PANGU.parameters().total
    assert [round(each.weights / count, 3) for each in found] == [2, 2, 2, 0.25]
    assert [round(each.gradients / count, 3) for each in found] == [4, 4, 0.5, 0.5]
    assert [round(each.states / count, 3) for each in found] == [12, 1.5, 1.5, 1.5]
    # Nobody to share with: the same as none.
    assert estimate(PANGU, Layout.of(zero=3)).static == estimate(PANGU, Layout()).static


def test_experts_are_divided_by_expert_and_tensor_parallelism_and_shared_by_the_rest() -> None:
    count, experts = MIXTRAL.parameters().total, MIXTRAL.parameters().experts
    whole = estimate(MIXTRAL, Layout.of(dp=8)).weights
    apart = estimate(MIXTRAL, Layout.of(dp=8, ep=8)).weights
    assert whole == 2 * count and apart == 2 * (count - experts + experts // 8)
    # Four ranks of experts, two copies of each: zero divides their states by two.
    shared = estimate(MIXTRAL, Layout.of(dp=8, ep=4, zero=1))
    assert shared.states == 12 * ((count - experts) // 8 + experts // 8)


def test_a_tied_head_on_another_stage_is_a_second_copy() -> None:
    words = PANGU.vocab_size * PANGU.hidden_size
    layers = PANGU.layers().total // 2
    bare = replace(PANGU, position_tables=0, query_layer=False)
    last = estimate(bare, Layout.of(pp=2, microbatches=1))
    assert last.weights == 2 * (layers + words + (2 * PANGU.hidden_size if last.stage else 0))


def test_what_is_made_again_or_off_the_device_is_not_kept() -> None:
    base = Layout.of(tp=8, sp=True, microbatches=8)
    kept = estimate(PANGU, base).parts["activations"]
    some = estimate(PANGU, base.replace(recompute="selective")).parts["activations"]
    least = estimate(PANGU, base.replace(recompute="full")).parts["activations"]
    off = estimate(PANGU, base.replace(offload=("activations",)))
    assert kept > some > least > 0
    assert off.parts["activations"] < kept / 5 and off.host > kept / 2
    here = PANGU.parameters().total / 8
    for overlap, of_a_parameter in ((True, 2 * 12 + 2), (False, 12 + 2)):
        away = estimate(PANGU, base.replace(offload=("optimizer",), optimizer_overlap=overlap))
        assert away.states == 0 and away.parts["states"] == 0
        assert away.gradients == estimate(PANGU, base).gradients
        assert away.host == pytest.approx(of_a_parameter * here, rel=0.02)


def test_logits_that_are_never_whole_take_a_chunk() -> None:
    one = Layout.of(micro_batch=8, precision="mixed")
    model = preset("llama3-8b")
    whole = estimate(model, one)
    tokens = 8 * 8192
    assert whole.moment == "loss" and whole.parts["logits"] == 2 * 2 * 128256 * tokens
    chunked = estimate(model, one.replace(chunked_loss=True))
    assert chunked.parts["logits"] <= (4 * 4096 + 4 * 4096) * tokens
    stock = estimate(model, one.replace(kernels="stock"))
    assert stock.parts["logits"] == 3 * 4 * 128256 * tokens


def test_plans_are_sorted_as_they_say() -> None:
    found = plan(PANGU, 8, 32 << 30, Layout.of(microbatches=8))
    fits = [row.left(found.memory) >= 0 for row in found.rows]
    assert fits == sorted(fits, reverse=True) and 0 < found.fitting < len(found.rows)
    first = found.rows[0].layout
    assert first.parallel.offload == () and first.recompute == "none" and first.parallel.pp == 1
    assert found.advice == f"take the first: {describe(first)}"
    assert all(row.layout.devices == 8 for row in found.rows)


def test_where_nothing_fits_the_advice_is_how_many_devices_would_do() -> None:
    found = plan(preset("pangu-200b"), 8, 32 << 30)
    assert found.fitting == 0
    assert "nothing fits in 32.00 GiB: the least is" in found.advice
    assert "such devices would do" in found.advice
    more = int(found.advice.split(" such devices")[0].split()[-1])
    assert plan(preset("pangu-200b"), more, 32 << 30).fitting > 0
    assert plan(preset("pangu-200b"), more // 2, 32 << 30).fitting == 0


@pytest.mark.parametrize(
    ("model", "devices", "choices", "says"),
    [
        (PANGU, 13, {"tp": (2,)}, "tp x pp x cp = 2 x 1 x 1 = 2 must divide the 13 devices"),
        (PANGU, 8, {"tp": (3,)}, "tp must be a divisor of the heads, 40, got 3"),
        (MIXTRAL, 8, {"tp": (8,), "ep": (8,)}, "ep must be a divisor of dp x cp = 1"),
        (PANGU, 8, {"base": Layout.of(cp=16)}, "tp x pp x cp = 1 x 1 x 16 = 16 must divide the 8"),
        (
            PANGU,
            8,
            {"pp": (4,), "schedule": ("dualpipev",), "base": Layout.of(microbatches=2)},
            "microbatches must be at least 8, the stages of 'dualpipev' on pp = 4 ranks, got 2",
        ),
    ],
)
def test_where_no_layout_is_possible_the_reason_is_that_of_what_was_asked_for(
    model: TransformerConfig, devices: int, choices: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError) as error:
        plan(model, devices, 32 << 30, **choices)
    assert f"plan: no layout is possible: {says}" in str(error.value)


def test_a_size_that_no_layout_has_is_noted() -> None:
    found = plan(PANGU, 8, 32 << 30, tp=(2, 3), ep=(1, 4))
    assert {row.layout.parallel.tp for row in found.rows} == {2}
    assert [note.split(",")[0] for note in found.notes] == [
        "tp must be a divisor of the heads",
        "ep must be 1 for a model without experts",
    ]
    virtual = plan(PANGU, 8, 32 << 30, schedule=("zbv",), virtual=3)
    assert ["pipeline_virtual must be 2" in note for note in virtual.notes] == [True]
    assert plan(PANGU, 8, 32 << 30).notes == ()


def test_advice_where_no_number_of_devices_would_do() -> None:
    one = {"tp": (1,), "pp": (1,), "recompute": ("full",)}
    found = plan(preset("gpt2"), 2, 100 << 20, Layout.of(micro_batch=8), **one)
    assert found.fitting == 0 and "a smaller micro-batch" in found.advice


def test_a_plan_of_slices_has_those_of_sequence_parallelism() -> None:
    sliced = Layout.of(recompute="full", recompute_slice_activation=True)
    assert plan(PANGU, 8, 32 << 30, sliced).rows == plan(PANGU, 8, 32 << 30).rows


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"memory": 0}, ValueError, "memory must be at least 1, got 0"),
        ({"memory": 1.5}, TypeError, "memory must be an int"),
        ({"devices": 0}, ValueError, "devices must be at least 1, got 0"),
        ({"tp": (0,)}, ValueError, "tp must be at least 1, got 0"),
        ({"recompute": ("slective",)}, ValueError, "recompute must be .*did you mean"),
        ({"schedule": ("1f2b",)}, ValueError, "pipeline_schedule must be .*did you mean"),
        ({"virtual": 0}, ValueError, "pipeline_virtual must be at least 1, got 0"),
        ({"global_batch": 0}, ValueError, "global_batch must be at least 1, got 0"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_named_and_not_passed_over(
    changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    if "global_batch" not in changes:
        with pytest.raises(kind, match=f"(plan|ParallelConfig): {words}"):
            plan(preset("gpt2"), **{"devices": 2, "memory": 16 << 30} | changes)
    if "virtual" not in changes:
        with pytest.raises(kind, match=f"(plan|fastest|ParallelConfig): {words}"):
            given = {"devices": 2, "global_batch": 8} | changes
            fastest(preset("gpt2"), device=load_device("h100"), **given)


def test_one_device_has_one_stage_of_zero() -> None:
    asked = plan(preset("gpt2"), 1, 16 << 30, zero=(1, 3))
    plain = plan(preset("gpt2"), 1, 16 << 30)
    assert [row.estimate for row in asked.rows] == [row.estimate for row in plain.rows]
    assert {row.layout.parallel.zero for row in asked.rows} == {1}


def test_layers_without_formulas_are_refused() -> None:
    model = preset("tiny-deepseek")
    for call in (lambda: plan(model, 8, 16 << 30), lambda: step_shape(model, Layout())):
        with pytest.raises(UnsupportedError, match="no formulas for models with kv_lora_rank"):
            call()


def test_experts_in_host_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="offload must be without 'experts'"):
        Layout(ParallelConfig(offload="experts"))


GPT2 = preset("gpt2")


# Of many micro-batches a table of all would take minutes.
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 32), (16, 32), (4, 1_000_000)])
def test_bubbles_are_those_of_the_formulae(ranks: int, microbatches: int) -> None:
    for name in ("gpipe", "1f1b"):
        found = schedule_cost(name, ranks, microbatches, 1).bubble
        assert found == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    for name, virtual in (("interleaved", 2), ("looped_bfs", 2), ("interleaved", 3)):
        found = schedule_cost(name, ranks, microbatches, virtual).bubble
        assert found == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (2, 24), (3, 33), (4, 32), (4, 10)])
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
    names = [layout.parallel.pipeline_schedule for layout in layouts]
    assert names == ["zbv", "zero_bubble", "interleaved", "1f1b"]
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


@pytest.mark.parametrize("module", [search, sizes, planner, models, checkpoint])
def test_examples_run(module: ModuleType) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    found = [module, *(getattr(module, name) for name in getattr(module, "__all__", ()))]
    tests = [test for each in found for test in doctest.DocTestFinder().find(each, "example")]
    examples = [each for each in tests if each.examples]
    for example in examples:
        example.globs.update({name: getattr(module, name) for name in dir(module)})
        runner.run(example)
    assert examples and runner.summarize(verbose=False).failed == 0
