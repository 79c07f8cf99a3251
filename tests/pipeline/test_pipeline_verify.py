"""``fusedops.verify`` draws pipelines: schedules, what training keeps, where states lie.

It finds what can be wrong in one, each planted here, and makes it small.
"""

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
from fusedops.parallel.pipeline.schedules import SCHEDULES
from fusedops.testing.standard import trained_by


def model() -> Transformer:
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "intermediate_size": 32}
    dropping = {"dropout": 0.2, "attention_dropout": 0.2}
    return Transformer(
        replace(preset("tiny-gpt2"), vocab_size=40, num_heads=2, **sizes, **dropping)
    )


def _verified(schedules: list[str], cases: int, **more: Any) -> None:
    report = fusedops.verify(
        model,
        [{"pp": 2}],
        options={"pipeline_schedule": schedules, "microbatches": [4], **more},
        cases=cases,
        batch_sizes=(4, 8),
        seq_lens=(5, 8),
    )
    assert len(report.passed) == cases, report


def test_a_few_pipelines() -> None:
    _verified(["1f1b", "zbv"], 2, recompute=["full"])


@pytest.mark.slow
def test_all_schedules_with_what_they_keep() -> None:
    offload = [(), ("optimizer",), ("activations",)]
    recompute = ["none", "full", "selective"]
    _verified(list(SCHEDULES), 63, offload=offload, recompute=recompute)


SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "intermediate_size": 16}
SMALL |= {"num_heads": 2, "vocab_size": 19, "seq_len": 16}


def gpt2() -> Transformer:
    return Transformer(replace(preset("tiny-gpt2"), **SMALL))


def mixtral() -> Transformer:
    experts = {"num_kv_heads": None, "num_experts": 2, "moe_layers": None, "capacity_factor": None}
    losses = {"balance_loss": 0.0, "z_loss": 0.1}  # a balance is not a sum over micro-batches
    return Transformer(replace(preset("tiny-mixtral"), **SMALL, **experts, **losses))


Result = tuple[torch.Tensor | None, torch.Tensor]
Compute = Callable[[int, int, torch.Tensor | None], Result]


def sharing(change: Callable[..., torch.Tensor]) -> Callable[[Compute, int], Compute]:
    """Change the share of the loss, of what is passed on, the micro-batch and their number."""

    def changed(compute: Compute, parts: int) -> Compute:
        def run(stage: int, microbatch: int, given: torch.Tensor | None) -> Result:
            passed, share = compute(stage, microbatch, given)
            return passed, change(share, passed, microbatch, parts)

        return run

    return changed


def out_of_order(compute: Compute, parts: int) -> Compute:
    """Take the tokens of one micro-batch and the hidden states of another."""

    def run(stage: int, microbatch: int, given: torch.Tensor | None) -> Result:
        return compute(stage, microbatch if given is None else parts - 1 - microbatch, given)

    return run


def one_buffer(compute: Compute, parts: int) -> Compute:
    """Receive each micro-batch where the one before it was."""
    memory: list[torch.Tensor] = []

    def run(stage: int, microbatch: int, given: torch.Tensor | None) -> Result:
        if given is not None:
            if not memory:
                memory.append(given.detach().clone())
            given.data = memory[0].copy_(given.detach())
        return compute(stage, microbatch, given)

    return run


COMPUTES = {
    "a micro-batch without gradient": sharing(lambda share, _, part, parts: share * (part != 1)),
    "loss divided by micro-batches": sharing(lambda share, _, part, parts: share / parts),
    "routers' losses of the last stage": sharing(
        lambda share, passed, *_: share if passed is None else share * 0
    ),
    "micro-batches out of order": out_of_order,
    "one buffer for all": one_buffer,
}


def planted(model: Transformer, mesh: Any, case: testing.Case, bug: str) -> testing.Parallel:
    """Parallelize a model as it should be, but for one thing."""
    given: dict[str, Any] = {**case.mesh, **case.options}
    engine = parallelize(model, ParallelConfig(**given))
    pipeline = engine.pipeline
    assert pipeline is not None
    driver = pipeline.driver
    if bug in COMPUTES:
        right, change = driver.step, COMPUTES[bug]
        parts = driver.table.microbatches
        driver.step = lambda compute, *more: right(change(compute, parts), *more)  # type: ignore
    elif bug == "words of both ends apart":
        object.__setattr__(pipeline, "tied_peer", None)
    elif bug == "sums of halves left out":
        for each in driver.data.values():
            each.end_part = lambda *, weights, last: None  # type: ignore[method-assign]
    return trained_by(engine)


# Model, what shows it beside pp 2, the schedule, and what the smallest case must still have.
BUGS: dict[str, tuple[Any, dict[str, int], str, dict[str, Any]]] = {
    "a micro-batch without gradient": (gpt2, {}, "1f1b", {}),
    "loss divided by micro-batches": (gpt2, {}, "zero_bubble", {}),
    "routers' losses of the last stage": (mixtral, {}, "1f1b", {}),
    "micro-batches out of order": (gpt2, {}, "1f1b", {}),
    "one buffer for all": (gpt2, {}, "gpipe", {}),
    "words of both ends apart": (gpt2, {"dp": 2}, "1f1b", {}),
    "sums of halves left out": (gpt2, {"dp": 2}, "zero_bubble", {"dp": 2}),
}


# The others are found in as much time.
FEW = ("a micro-batch without gradient", "words of both ends apart", "sums of halves left out")


@pytest.mark.ci
@pytest.mark.parametrize(
    "bug", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in BUGS]
)
def test_a_bug_of_a_pipeline_is_found_and_made_small(bug: str) -> None:
    factory, more, schedule, kept = BUGS[bug]
    options: dict[str, list[Any]] = {"microbatches": [2], "pipeline_schedule": [schedule]}
    if "halves" in bug:
        options["zero"] = [1]
    with pytest.raises(testing.ParityError) as caught:
        fusedops.verify(
            factory,
            [{"pp": 2, **more}],
            parallelize=functools.partial(planted, bug=bug),
            options=options,
            batch_sizes=(4,),
            seq_lens=(4,),
            workloads=("random",),
            cases=1,
        )
    text = str(caught.value)
    assert "should be" in text
    small = {"pp": 2, **kept}
    smallest = text.rpartition("testing.Case(")[2].partition("\n")[0]
    assert smallest.startswith(f"mesh={small!r}, ") and "steps" not in smallest
