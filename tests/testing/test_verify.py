"""``verify`` passes right parallel code, and finds a bug of each kind in code that is not."""

from __future__ import annotations

import functools
import itertools
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_parallel
import torch

from fusedops import testing
from fusedops._core.parameter_names import plain_name
from fusedops.testing import fuzzer
from fusedops.testing.case import Space

MODELS = {"plain": tiny_parallel.plain, "dropout": tiny_parallel.with_dropout}

# A bug, and a mesh and options with which it shows.
BUGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "bias per rank": ({"tp": 2}, {}),
    "copy": ({"tp": 2}, {}),
    "norms": ({"tp": 2}, {"sp": True}),
    "dropout per rank": ({"tp": 2}, {"sp": True}),
    "read early": ({"tp": 2}, {}),
    "no sum over dp": ({"dp": 2}, {}),
    "mean of means": ({"dp": 2}, {}),
    "stale recompute": ({"dp": 2}, {"recompute": True}),
    "overwritten": ({"dp": 2}, {"microbatches": 2}),
    "loss scale": ({"dp": 2}, {"zero": True}),
    "norm per rank": ({"tp": 2}, {}),
}


def test_right_code_passes() -> None:
    report = testing.verify(
        MODELS,
        [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}],
        parallelize=tiny_parallel.parallelize,
        options={"sp": [False, True], "zero": [False, True]},
        cases=8,
    )
    assert report, report
    assert len(report.passed) + len(report.refused) == 8


def look_for(bug: str, mesh: dict[str, int], **more: Any) -> pytest.ExceptionInfo[Any]:
    """Verify code with a bug; returns the error."""
    options = BUGS[bug][1] if bug in BUGS else {}
    with pytest.raises(testing.ParityError) as caught:
        testing.verify(
            MODELS,
            [mesh],
            parallelize=functools.partial(tiny_parallel.parallelize, bug=bug),
            options={name: [value] for name, value in options.items()},
            cases=8,
            **more,
        )
    return caught


@pytest.mark.ci
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most of the time goes into smaller cases, which have a test of their own below.
    monkeypatch.setattr(fuzzer, "shrink", lambda case, space, fails: case)
    caught = look_for(bug, BUGS[bug][0], batch_sizes=(4,), seq_lens=(8,))
    assert "should be" in str(caught.value)
    assert bug != "norm per rank" or "step 0: norm is" in str(caught.value)


def test_a_step_of_another_optimizer_is_found_in_the_weights() -> None:
    def parallelize(model: Any, mesh: Any, case: testing.Case) -> Any:
        parallel = tiny_parallel.parallelize(model, mesh, case)
        return replace(parallel, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(testing.ParityError, match="differs\nstep 1: weight"):
        testing.replay(testing.Case({"dp": 2}), tiny_parallel.plain, parallelize=parallelize)


def test_what_only_half_precision_loses_is_found_there() -> None:
    sizes: dict[str, Any] = {"batch_sizes": (8,), "seq_lens": (33,), "workloads": ("random",)}
    caught = look_for("running sum", {"dp": 2}, dtypes=(torch.bfloat16,), **sizes)
    assert "loss is" in str(caught.value)
    # As it should be without the bug, and with it where sums are exact.
    for bug, dtype in (("", torch.bfloat16), ("running sum", torch.float32)):
        parallel = functools.partial(tiny_parallel.parallelize, bug=bug)
        meshes = [{"dp": 2}, {"tp": 2}]
        given: dict[str, Any] = {"parallelize": parallel, "dtypes": (dtype,), "cases": 4}
        assert testing.verify(MODELS, meshes, **given, **sizes)


@pytest.mark.ci
def test_a_failure_is_shrunk_to_a_case_that_fails_again() -> None:
    text = str(look_for("bias per rank", {"dp": 2, "tp": 2}).value)
    (line,) = [line.strip() for line in text.splitlines() if line.startswith("    testing.Case(")]
    assert line == "testing.Case(mesh={'tp': 2}, model='plain', batch_size=1, seq_len=2)"
    wrong = functools.partial(tiny_parallel.parallelize, bug="bias per rank")
    with pytest.raises(testing.ParityError, match="should be"):
        testing.replay(eval(line), MODELS, parallelize=wrong)


def test_names_of_parameters_lose_what_wrappers_put_in_and_nothing_else() -> None:
    assert plain_name("module._orig_mod.layers.submodule.weight") == "layers.submodule.weight"


def test_what_cannot_be_done_is_counted_with_its_reason() -> None:
    given: dict[str, Any] = {"parallelize": tiny_parallel.parallelize, "cases": 2}
    meshes = [{"dp": 2, "tp": 2}, {"dp": 2}]
    report = testing.verify(tiny_parallel.plain, meshes, options={"zero": [True]}, **given)
    assert len(report.passed) == 1
    assert [why for _, why in report.refused] == ["zero is only written for dp alone"]
    with pytest.raises(testing.ParityError, match="0 cases as in .*\n.*1 x: zero is only written"):
        testing.verify(
            tiny_parallel.plain, meshes[:1], options={"zero": [True]}, **given | {"cases": 1}
        )


def test_what_one_rank_alone_refuses_is_a_failure() -> None:
    def parallelize(model: Any, mesh: Any, case: testing.Case) -> Any:
        if torch.distributed.get_rank() == 1:
            raise ValueError("of rank 1 alone")
        return tiny_parallel.parallelize(model, mesh, case)

    with pytest.raises(testing.ParityError, match="of rank 1 alone(.|\n)*smallest case that fails"):
        testing.verify(tiny_parallel.plain, [{"dp": 2}], parallelize=parallelize, cases=1)


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ({"meshes": []}, ValueError, "meshes must be a list of at least one value"),
        ({"meshes": {"dp": 2}}, TypeError, "meshes must be a list of values to choose from"),
        ({"meshes": [{"dp": 0}]}, ValueError, "axis 'dp' of a mesh must be at least 1, got 0"),
        ({"meshes": [{}]}, ValueError, "each mesh must be a dict of at least one axis"),
        ({"options": {"zero": 2}}, TypeError, r"options\['zero'\] must be a list of values"),
        ({"options": {"a": "none"}}, TypeError, r"options\['a'\] must be a list .* got 'none'"),
        ({"options": {"zero": []}}, ValueError, r"options\['zero'\] must be a list of at least"),
        ({"batch_sizes": (0,)}, ValueError, "each of batch_sizes must be at least 1, got 0"),
        ({"workloads": ("randm",)}, ValueError, "did you mean 'random'"),
        ({"dtypes": (torch.int8,)}, ValueError, "each of dtypes must be a floating torch.dtype"),
        ({"cases": 0}, ValueError, "cases must be at least 1, got 0"),
        ({"ranks": "thread"}, ValueError, "ranks must be"),
        ({"model_factory": tiny_parallel.plain()}, TypeError, "model_factory must be a function"),
        ({"model_factory": Path}, ValueError, "batch must be given"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_input(wrong: dict[str, Any], error: type[Exception], says: str) -> None:
    given = {"model_factory": tiny_parallel.plain, "meshes": [{"dp": 2}]} | wrong
    with pytest.raises(error, match=says):
        testing.verify(**given, parallelize=tiny_parallel.parallelize)


@pytest.mark.parametrize(
    ("meshes", "options", "says"),
    [
        ([{"dpp": 2}], {}, "an axis of a mesh .* got 'dpp' .did you mean '.p'"),
        ([{"ep": 2}], {}, "a key of options is any other size.* got 'ep'"),
        ([{"dp": 2}], {"zro": [1]}, "the name of an option .*did you mean 'zero'"),
        ([{"dp": 2}], {"tp": [2]}, "meshes has the axes.* got 'tp'"),
        ([{"dp": 2}], {"recompute": ["none", "ful"]}, "recompute='ful' .*did you mean 'full'"),
        ([{"dp": 2}], {"ep": [3]}, "option ep=3 is possible in no combination: .*ep must be a div"),
        ([{"dp": 2}, {"tp": 2}], {"ep": [2]}, "mesh {'tp': 2} is possible in no combination"),
    ],
)
def test_what_no_case_could_have_is_an_error_before_anything_runs(
    meshes: list[dict[str, int]], options: dict[str, list[Any]], says: str
) -> None:
    def not_made() -> Any:
        raise AssertionError("a model was made")

    with pytest.raises(ValueError, match=says):
        testing.verify(not_made, meshes, options=options)
    if len(meshes) == 1:
        chosen = {name: values[-1] for name, values in options.items()}
        with pytest.raises(ValueError, match=says):
            testing.replay(testing.Case(meshes[0], chosen), not_made)


@pytest.mark.parametrize("count", [4, 18])
def test_cases_are_drawn_without_a_list_of_too_many_combinations(count: int) -> None:
    options = {f"option {i}": (False, True) for i in range(count)}
    space = Space([{}], options)
    tracemalloc.start()
    try:
        cases = [case for case, _ in itertools.islice(space.draw(0), 64)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    drawn = {name: {case.options[name] for case in cases} for name in options}
    assert drawn == {name: {False, True} for name in options}
    assert len({case.code() for case in cases[:16]}) == 16
