"""A transformer in stages: the values of one process, what lives, what is computed and saved.

Values are compared in float64, so that what is left are differences of order. Ranks are threads but
where gloo itself is the point.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_process import SEED, assert_one_process, one_process_engine, shards_of, tiny
from run_ranks import on_threads
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fusedops import UnsupportedError
from fusedops.checkpoint import Checkpointer
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.pipeline import PipelineEngine
from fusedops.parallel import timeline
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
    "latent-attention": ("tiny-deepseek", {"tp": 2, "microbatches": 2}),
    "cuts": ("tiny-llama", {"microbatches": 2, "pipeline_cuts": (3,)}),
    "dp-zero1": ("tiny-llama", {"dp": 2, "zero": 1, "microbatches": 2}),
    "dp-split-backward": ("tiny-gpt2", {"dp": 2, "microbatches": 2} | ZERO_BUBBLE),
    "tp-sp": ("tiny-gpt2", {"tp": 2, "sp": True, "microbatches": 2}),
    "recompute-split-backward": ("tiny-llama", {"pipeline_schedule": "zbv", "recompute": "full"}),
    "zero1-split-backward": ("tiny-gpt2", {"dp": 2, "zero": 1, "pipeline_schedule": "zbv"}),
    "zero3-split-backward": ("tiny-mixtral", {"dp": 2, "zero": 3} | ZERO_BUBBLE),
}


@pytest.mark.ci(every=2)
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
    "four ranks": {"pp": 4, "microbatches": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-mixtral"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_goes_with_every_mode(schedule: str, option: str, name: str) -> None:
    values = {"pp": 2, "pipeline_schedule": schedule, **OPTIONS[option]}
    _assert_stages(name, values, num_layers=2 * values["pp"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_experts_are_shared_beside_stages(schedule: str) -> None:
    _assert_stages("tiny-mixtral", {"dp": 2, "ep": 2, "pipeline_schedule": schedule})


def _spread(name: str, **values: Any) -> TrainEngine:
    model = Transformer(_config(name), dtype=torch.float64, device="meta")
    return parallelize(model, ParallelConfig(**values), seed=SEED)


def _step(run: TrainEngine) -> None:
    run.step(*shards_of(run))


class _Products(TorchDispatchMode):
    """Counts operations by torch's and our formulae.

    torch's own counter asks, to know whose they are, what the first half of a backward cannot say.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=found)
        return found


def _observed(rank: int, schedule: str, microbatches: int) -> Any:
    """Return what ran in a step, and the operations of its products."""
    run = _spread("tiny-llama", pp=2, microbatches=microbatches, pipeline_schedule=schedule)
    _step(run)
    run.model.zero_grad()
    with collectives.recorded() as log, _Products() as products:
        _step(run)
    pipeline = run.pipeline
    assert pipeline is not None
    return log, products.total, pipeline.driver.table


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "zbv", "dualpipev"])
def test_what_ran_is_the_schedule_and_each_product_once(schedule: str) -> None:
    """As many micro-batches are alive as the formulae say, and a backward in two parts multiplies
    as often as a whole one."""
    microbatches = 8
    found = threads.run(_observed, 2, schedule, microbatches)
    order = found[0][2]
    line = timeline([log for log, _, _ in found])
    ran = [[each.action for each in rank] for rank in line.spans]
    assert ran == [list(action) for action in order.actions]
    assert line.alive() == timeline(order).alive()
    if schedule in ("gpipe", "1f1b"):
        assert line.alive() == ([microbatches] * 2 if schedule == "gpipe" else [2, 1])
    with _Products() as products:
        _step(one_process_engine(_config("tiny-llama"), microbatches))
    assert sum(each[1] for each in found) == products.total


class _Kept:
    """A tensor that autograd keeps; counted while it is there, by rank."""

    now: Counter[int] = Counter()
    most: Counter[int] = Counter()

    def __init__(self, rank: int, tensor: torch.Tensor) -> None:
        self.rank, self.tensor = rank, tensor.detach()  # an output would keep its own graph
        self.now[rank] += 1
        self.most[rank] = max(self.most[rank], self.now[rank])

    def __del__(self) -> None:
        self.now[self.rank] -= 1


def _keeps(rank: int, schedule: str, microbatches: int) -> int:
    """Return how many tensors autograd keeps at most in a step."""
    run = _spread("tiny-llama", pp=2, microbatches=microbatches, pipeline_schedule=schedule)
    _Kept.now[rank] = _Kept.most[rank] = 0
    with torch.autograd.graph.saved_tensors_hooks(partial(_Kept, rank), lambda kept: kept.tensor):
        _step(run)
    assert _Kept.now[rank] == 0  # nothing outlives its backward
    return _Kept.most[rank]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_what_autograd_keeps_is_bounded_by_what_is_alive(schedule: str) -> None:
    one = threads.run(_keeps, 2, "1f1b", 1)
    alive = timeline(schedule, 2, 8).alive()
    for kept, single, parts in zip(threads.run(_keeps, 2, schedule, 8), one, alive, strict=True):
        if schedule == "zero_bubble":  # between its parts a backward needs less
            assert single < kept <= parts * single
        else:
            assert kept == parts * single


def _goes_on(folder: str, run: TrainEngine) -> dict[str, torch.Tensor]:
    """Take a step from the last checkpoint on and save; return the weights that are here."""
    # A small eps would take steps from the rounding of gradients that are 0 in exact arithmetic.
    optimizer = run.optimizer(lr=0.01, eps=1e-3)
    with Checkpointer(folder, run.model, optimizer) as keeper:
        restored = keeper.load()
        _step(run)
        run.clip(1.0)
        optimizer.step()
        keeper.save(1 if restored is None else restored.step + 1)
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def _in_stages(rank: int, folder: str, schedule: str) -> dict[str, torch.Tensor]:
    return _goes_on(folder, _spread("tiny-gpt2", pp=2, microbatches=4, pipeline_schedule=schedule))


def _alone(folder: str) -> dict[str, torch.Tensor]:
    return _goes_on(folder, one_process_engine(_config("tiny-gpt2"), 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_checkpoint_of_stages_is_one_of_the_whole_model(
    schedule: str, on_processes: Any, tmp_path: Path
) -> None:
    """A step in stages and one on one process, in either order, are two steps on one process."""
    whole, there, back = (str(tmp_path / each) for each in ("whole", "there", "back"))
    _alone(whole)
    expected = _alone(whole)
    on_processes(_in_stages, 2, there, schedule)
    torch.testing.assert_close(_alone(there), expected)
    _alone(back)
    parts = on_processes(_in_stages, 2, back, schedule)
    assert parts[0].keys() | parts[1].keys() == expected.keys()
    for part in parts:
        torch.testing.assert_close(part, {name: expected[name] for name in part})


@on_threads(2)
def test_words_of_both_ends_stay_equal_to_the_bit(rank: int) -> None:
    run = _spread("tiny-gpt2", pp=2, microbatches=4)
    optimizer = run.optimizer(lr=0.01)
    for _ in range(2):
        _step(run)
        optimizer.step()
        optimizer.zero_grad()
    words = run.model.embedding.tokens.weight.detach()
    both = [torch.empty_like(words) for _ in range(2)]
    dist.all_gather(both, words)
    assert torch.equal(*both)


@on_threads(2)
def test_what_a_part_of_a_model_cannot_do_is_told(rank: int) -> None:
    run = _spread("tiny-llama", pp=2, microbatches=4)
    with pytest.raises(ValueError, match="shards must be microbatches = 4 of them.* got 1"):
        shard = run.shard_batch(torch.zeros(1, 4, dtype=torch.int64))
        run.step([shard], torch.tensor(4))
    with pytest.raises(UnsupportedError, match="call clip of the engine before"):
        run.optimizer(max_norm=1.0)
    with pytest.raises(UnsupportedError, match="call step or forward of the TrainEngine"):
        run.model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@on_threads(4)
def test_gradients_are_reduced_while_the_last_backward_runs(rank: int, schedule: str) -> None:
    """Half of a backward passes hooks by: there the reductions begin when it has ended."""
    sizes = {"dp": 2, "pp": 2, "microbatches": 4, "bucket_bytes": 1}
    engine = _spread("tiny-gpt2", pipeline_schedule=schedule, **sizes)
    with collectives.recorded() as log:
        _step(engine)
    inside, running, starts = 0, None, 0
    for event in log.events:
        if event.kind == collectives.COMPUTE:
            running = event.label if event.phase == "start" else None
        elif event.phase == "start" and event.label.startswith("gradients"):
            starts += 1
            inside += running is not None
    assert starts > 10
    assert (inside > starts // 2) == (schedule == "1f1b")
