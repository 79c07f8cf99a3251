"""Bugs of pipelines, planted here: ``fusedops.verify`` finds them and makes them small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedops
from fusedops import testing
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.testing.standard import trained_by

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "intermediate_size": 16}
SMALL |= {"num_heads": 2, "vocab_size": 19, "seq_len": 16}


def gpt2() -> Transformer:
    return Transformer(replace(preset("tiny-gpt2"), **SMALL))


Compute = Callable[[int, int, torch.Tensor | None], tuple[torch.Tensor | None, torch.Tensor]]


def without_the_second(compute: Compute) -> Compute:
    """Let one micro-batch have no gradient."""

    def run(stage: int, microbatch: int, given: torch.Tensor | None) -> Any:
        passed, share = compute(stage, microbatch, given)
        return passed, share * (microbatch != 1)

    return run


def planted(model: Transformer, mesh: Any, case: testing.Case, bug: str) -> testing.Parallel:
    """Parallelize a model as it should be, but for one thing."""
    given: dict[str, Any] = {**case.mesh, **case.options}
    engine = parallelize(model, ParallelConfig(**given))
    pipeline = engine.pipeline
    assert pipeline is not None
    driver = pipeline.driver
    if bug == "a micro-batch without gradient":
        right = driver.step
        driver.step = lambda compute, *more: right(without_the_second(compute), *more)  # type: ignore
    elif bug == "words of both ends apart":
        object.__setattr__(pipeline, "tied_peer", None)
    else:
        for each in driver.data.values():
            each.end_part = lambda *, weights, last: None  # type: ignore[method-assign]
    return trained_by(engine)


# What shows it beside pp 2, options, and what the smallest case must still have.
BUGS: dict[str, tuple[dict[str, int], dict[str, list[Any]], dict[str, int]]] = {
    "a micro-batch without gradient": ({}, {"pipeline_schedule": ["1f1b"]}, {}),
    "words of both ends apart": ({"dp": 2}, {"pipeline_schedule": ["1f1b"]}, {}),
    "sums of halves left out": (
        {"dp": 2},
        {"pipeline_schedule": ["zero_bubble"], "zero": [1]},
        {"dp": 2},
    ),
}


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_a_pipeline_is_found_and_made_small(bug: str) -> None:
    more, options, kept = BUGS[bug]
    with pytest.raises(testing.ParityError) as caught:
        fusedops.verify(
            gpt2,
            [{"pp": 2, **more}],
            parallelize=functools.partial(planted, bug=bug),
            options={"microbatches": [2], **options},
            batch_sizes=(4,),
            seq_lens=(4,),
            workloads=("random",),
            cases=1,
        )
    text = str(caught.value)
    assert "should be" in text
    smallest = text.rpartition("testing.Case(")[2].partition("\n")[0]
    assert smallest.startswith(f"mesh={ ({'pp': 2} | kept)!r}, ") and "steps" not in smallest
