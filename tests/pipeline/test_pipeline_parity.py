"""A transformer in stages: the loss, the norm, the gradients and the weights of one process.

In float64, so that what is left are differences of order. Ranks are threads but where gloo itself
is the point.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_process import assert_one_process, tiny
from run_ranks import on_threads

from fusedops.models import ParallelConfig, Transformer, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.pipeline import PipelineEngine
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending
from fusedops.testing import threads

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev")


def _config(name: str, **changes: Any) -> Any:
    # Layers of experts alone, and losses of routers that are no small part of the loss.
    experts = {"moe_layers": None, "balance_loss": 0.5, "z_loss": 0.1}
    sizes = experts if preset(name).num_experts else {}
    return tiny(preset(name), **({"num_layers": 4} | sizes | changes))


def _assert_stages(name: str, values: dict[str, Any], **changes: Any) -> None:
    """Compare all ranks; their parts make the complete model."""
    values, config = {"pp": 2, "microbatches": 4} | values, _config(name, **changes)
    parts = threads.run(assert_one_process, ParallelConfig(**values).sizes.ranks, config, values)
    parameters = dict(Transformer(config).named_parameters())
    assert {name for part in parts for name in part} == parameters.keys()


ZERO_BUBBLE = {"pipeline_schedule": "zero_bubble"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{schedule: ("tiny-gpt2", {"pipeline_schedule": schedule}) for schedule in SCHEDULES},
    # Losses of routers count once on each stage.
    "routers": ("tiny-mixtral", {}),
    "routers-zbv": ("tiny-mixtral", {"pipeline_schedule": "zbv"}),
    "cuts": ("tiny-llama", {"microbatches": 2, "pipeline_cuts": (3,)}),
    "dp-zero1": ("tiny-llama", {"dp": 2, "zero": 1, "microbatches": 2}),
    "dp-split-backward": ("tiny-gpt2", {"dp": 2, "microbatches": 2} | ZERO_BUBBLE),
    "tp-sp": ("tiny-gpt2", {"tp": 2, "sp": True, "microbatches": 2}),
    "recompute-split-backward": ("tiny-llama", {"pipeline_schedule": "zbv", "recompute": "full"}),
    "zero1-split-backward": ("tiny-gpt2", {"dp": 2, "zero": 1, "pipeline_schedule": "zbv"}),
    "zero3-split-backward": ("tiny-mixtral", {"dp": 2, "zero": 3} | ZERO_BUBBLE),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_one_process_does(case: str) -> None:
    name, values = CASES[case]
    _assert_stages(name, values)


@pytest.mark.parametrize(
    "frozen", [("embedding.*",), ("embedding.*", "layers.[01].*"), ("layers.[23].*", "norm.*")]
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
@on_threads(2)
def test_frozen_parameters_do_not_stop_the_others(
    rank: int, schedule: str, frozen: tuple[str, ...]
) -> None:
    values = {"pp": 2, "microbatches": 4, "pipeline_schedule": schedule}
    assert_one_process(rank, _config("tiny-gpt2"), values, frozen=frozen)


def test_the_norm_of_a_stage_without_gradients_is_on_the_device_of_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From where the backend of the group can send it, such as NCCL from a GPU."""
    devices = []

    def gather(squares: torch.Tensor, *_: Any, **options: Any) -> Pending:
        devices.append(squares.device.type)
        return Pending(lambda: torch.zeros(2))

    monkeypatch.setattr(collectives, "all_gather", gather)
    model: Any = Transformer(_config("tiny-gpt2"), device="meta")
    driver: Any = SimpleNamespace(group=None)
    PipelineEngine(model, {}, driver, None).norm()
    assert devices == ["meta"] == [TrainEngine(model).norm().device.type]


def test_the_query_layer_stays_with_its_norm_on_the_last_stage() -> None:
    values = {"microbatches": 2, "pipeline_balance": "layers"}
    _assert_stages("tiny-gpt2", values, query_layer=True, position_tables=2, tied=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offload": {"offload": ("activations",)},
    "dp-cp": {"dp": 2, "cp": 2},
    "tp-sp": {"tp": 2, "sp": True},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "layers": {"pipeline_balance": "layers"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-mixtral"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_goes_with_every_mode(schedule: str, option: str, name: str) -> None:
    _assert_stages(name, {"pipeline_schedule": schedule, **OPTIONS[option]})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_experts_are_shared_beside_stages(schedule: str) -> None:
    _assert_stages("tiny-mixtral", {"dp": 2, "ep": 2, "pipeline_schedule": schedule})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(schedule: str) -> None:
    values = {"pp": 4, "microbatches": 8, "pipeline_schedule": schedule}
    _assert_stages("tiny-gpt2", values, num_layers=8)
