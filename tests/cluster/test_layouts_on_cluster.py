"""Each axis and mode on ranks: losses, gradients and weights of two steps are one process's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from short_training import (
    Training,
    assert_parity,
    build,
    make_steps,
    model_config,
    reference,
    train,
)

from fusedops.testing import cluster_step
from fusedops.testing.case_run import Reference

pytestmark = pytest.mark.distributed
LLAMA = model_config("tiny-llama")
PIPELINE = {"pp": 2, "microbatches": 2}
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
# Which tokens exceed a capacity depends on the layout.
EXPERTS = model_config("tiny-pangu-moe", capacity_factor=None)
WINDOW = model_config("tiny-llama", sliding_window=10)
TRAININGS = {
    "pp-1f1b": Training(LLAMA, {**PIPELINE, "pipeline_schedule": "1f1b"}),
    "pp-zero-bubble": Training(LLAMA, {**PIPELINE, "pipeline_schedule": "zero_bubble"}),
    "tp-sp-overlap": Training(LLAMA, {"tp": 2, "sp": True, "overlap": True}),
    "zero3": Training(LLAMA, {"dp": 2, "zero": 3}),
    "ep": Training(EXPERTS, {"dp": 2, "ep": 2}),
    "cp-window-documents": Training(WINDOW, {"cp": 2}, documents=True),
    "mixed-precision": Training(LLAMA, {"dp": 2, "zero": 3, **MIXED}),
    "offload": Training(LLAMA, {"dp": 2, "zero": 2, "offload": ("optimizer", "activations")}),
}


@functools.cache
def _reference(device: str, name: str) -> Reference:
    return reference(device, TRAININGS[name])


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_train_as_one_process_does(cluster: Any, name: str) -> None:
    training = TRAININGS[name]
    layout = cluster.layout(training.layout)
    results = cluster.run(train, training._replace(layout=layout))
    assert_parity(results, _reference(cluster.device, name), layout)


@pytest.mark.parametrize("name", TRAININGS)
def test_tensors_of_a_step_are_on_the_device(device: str, name: str) -> None:
    """With the GPUs of ``cluster_step``, which the CPU's rehearsal does not distinguish."""
    if device == "cuda":
        pytest.skip("the step runs on GPUs that are there")
    training = TRAININGS[name]

    def make() -> Any:
        engine, optimizer = build("cuda", training)
        return lambda: make_steps("cuda", engine, optimizer, training, [0])

    step = cluster_step(make, 2)
    assert step.misplaced == {} and step.unconnected == (), str(step)
    assert any(rank.communications for rank in step.ranks)
