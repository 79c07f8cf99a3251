"""A transformer on many processes: the loss, gradients and weights of one process.

In float64, so that what is left are differences of order, and any of meaning is plain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import SEED, Step, assert_one_process, full_tensor, run_step, shards_of, tiny
from run_ranks import on_threads
from torch import nn

from fusedops import UnsupportedError
from fusedops.checkpoint.tensors import State
from fusedops.generation import generate
from fusedops.models import ParallelConfig, RopeScaling, Transformer, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.testing import threads

OnProcesses = Callable[..., list[Any]]


def _config(name: str, **changes: Any) -> Any:
    # The padding's row is on the last rank.
    return tiny(preset(name), **({"num_layers": 2, "pad_token_id": 130} | changes))


def _assert_parity(
    rank: int, name: str, values: dict[str, Any], on_meta: bool = True, documents: bool = False
) -> None:
    options = {"on_meta": on_meta, "documents": documents, "own_loop": True}
    names = assert_one_process(rank, _config(name), values, **options)
    assert set(names) == {name for name, _ in Transformer(_config(name)).named_parameters()}


KEPT = {"mp_comm_recompute": False}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
# Name of the model, sizes and options, ranks. Where one process has values of a model already, not
# on meta, those of rank 0 count. Sequences of several documents are attended one by one.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("tiny-gpt2", {"dp": 2}),
    "mode-data-zero1": ("tiny-llama", {"mode": "data", "zero": 1}),
    "tp2": ("tiny-gpt2", {"tp": 2}),
    "tp4-sp": ("tiny-llama", {"tp": 4, "sp": True}),
    "cp2": ("tiny-gpt2", {"cp": 2}),
    "cp2-ulysses": ("tiny-llama", {"cp": 2, "context": "all_to_all"}),
    "dp2-zero1-microbatches": ("tiny-llama", {"dp": 2, "zero": 1, "microbatches": 2}),
    "dp2-zero2-offload": ("tiny-gpt2", {"dp": 2, "zero": 2, "offload": ("optimizer",)}),
    "dp2-zero3-recompute": ("tiny-llama", {"dp": 2, "zero": 3, "recompute": "full"}),
    "dp2-offload-all-microbatches": (
        "tiny-gpt2",
        {"dp": 2, "offload": ("optimizer", "activations"), "microbatches": 2},
    ),
    "dp2-tp2-cp2-sp-zero2": ("tiny-qwen3", {"dp": 2, "tp": 2, "cp": 2, "sp": True, "zero": 2}),
    "tp2-recompute-sliced": ("tiny-gpt2", FULL | {"tp": 2, "recompute_slice_activation": True}),
    "tp2-recompute-kept": ("tiny-gpt2", FULL | KEPT | {"tp": 2}),
    "tp2-sp-recompute-kept": ("tiny-llama", FULL | KEPT | {"tp": 2, "sp": True}),
    "tp2-recompute-first-layer": ("tiny-llama", FULL | {"tp": 2, "recompute_layers": 1}),
    "dp2-selective-first-layer": ("tiny-mixtral", SELECTIVE | {"dp": 2, "recompute_layers": 1}),
    "dp2-selective": ("tiny-gpt2", SELECTIVE | {"dp": 2}),
    "dp4-replicas": ("tiny-llama", {"dp": 4, "zero": 2, "shard_ranks": 2}),
    "dp2-left-whole": (
        "tiny-llama",
        {"dp": 2, "zero": 2, "shard_threshold": 2000, "not_sharded": ("head.*", "*down_proj*")},
    ),
    "dp2-buckets-of-layers": ("tiny-llama", {"dp": 2, "bucket_layers": (1,), "overlap": False}),
    "bert-tp2-sp": ("tiny-bert", {"tp": 2, "sp": True}),
    "pangu-tp2-sp": ("tiny-pangu", {"tp": 2, "sp": True}),
    "alibi-tp2-cp2": ("tiny-alibi", {"tp": 2, "cp": 2}),
    "alibi-cp2-ulysses": ("tiny-alibi", {"cp": 2, "context": "all_to_all"}),
    "pangu-cp2": ("tiny-pangu", {"cp": 2}),
    "pangu-cp2-ulysses": ("tiny-pangu", {"cp": 2, "context": "all_to_all"}),
    "deepseek-tp2": ("tiny-deepseek", {"tp": 2}),
    "deepseek-tp2-cp2-sp-zero3": (
        "tiny-deepseek",
        {"dp": 2, "tp": 2, "cp": 2, "sp": True, "zero": 3},
    ),
    "deepseek-cp2-ulysses": ("tiny-deepseek", {"cp": 2, "context": "all_to_all"}),
    "deepseek-dp2-ep2": ("tiny-deepseek", {"dp": 2, "ep": 2, "recompute": "selective"}),
    "deepseek-tp2-overlap": ("tiny-deepseek", {"tp": 2, "overlap_microbatches": True}),
    "mixtral-tp2-sp": ("tiny-mixtral", {"tp": 2, "sp": True}),
    "mixtral-dp2-tp2-zero3": ("tiny-mixtral", {"dp": 2, "tp": 2, "zero": 3}),
}
GIVEN = ("dp2", "tp2")


def _ranks(values: dict[str, Any]) -> int:
    if values.get("mode") == "data":
        return 2
    return ParallelConfig(**values).sizes.ranks


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_process(case: str) -> None:
    name, values = CASES[case]
    given, documents = case in GIVEN, "cp2" in case or case == "tp4-sp"
    threads.run(
        lambda rank: _assert_parity(rank, name, values, not given, documents), _ranks(values)
    )


def _seeded_step(seed: int, values: dict[str, Any], own_loop: bool) -> Step:
    """Make a step from weights and dropout that this process's generator decides."""
    torch.manual_seed(seed)
    config = _config("tiny-gpt2", dropout=0.2, attention_dropout=0.2)
    model = Transformer(config, dtype=torch.float64, device="meta")
    return run_step(parallelize(model, ParallelConfig(**values)), own_loop=own_loop)


@pytest.mark.parametrize(
    ("values", "own_loop"),
    [
        ({"dp": 2}, True),
        ({"dp": 2, "tp": 2, "zero": 3}, False),
        ({"tp": 2, "sp": True}, True),
        ({"cp": 2}, False),
        ({"pp": 2, "tp": 2, "microbatches": 2, "overlap_microbatches": True}, False),
    ],
    ids=str,
)
def test_ranks_that_are_seeded_differently_draw_as_the_first(
    values: dict[str, Any], own_loop: bool
) -> None:
    alone = {"microbatches": values.get("microbatches", 1)}
    expected = _seeded_step(100, alone, own_loop)
    for step in threads.run(
        lambda rank: _seeded_step(100 + rank, values, own_loop), _ranks(values)
    ):
        torch.testing.assert_close(step.loss, expected.loss)
        for name, weight in step.weights.items():
            torch.testing.assert_close(weight, expected.weights[name])


Call = Callable[[TrainEngine, Any], object]
# What may be called between a step's backward and the optimizer's step.
CALLS: dict[str, Call] = {
    "forward": lambda run, shards: run.forward(shards),
    "begin": lambda run, shards: run.begin(last=True),
    "begin of an earlier one": lambda run, shards: run.begin(last=False),
    "a forward without a backward": lambda run, shards: run.loss(
        run.model(*shards[0][:2], positions=shards[0].positions), run.count(shards[0].labels)
    ),
    "norm": lambda run, shards: run.norm(),
    "state_dict": lambda run, shards: run.model.state_dict(),
    "checkpoint": lambda run, shards: State(run.model, ()).content(),
    "generate": lambda run, shards: generate(run, [[3, 1]], tokens=2),
}


def _steps_with(values: dict[str, Any], call: Call | None) -> list[Any]:
    """Make a step with a call after clipping, and one with a call before it.

    Returns the norms and the weights.
    """
    name = "tiny-mixtral" if "ep" in values else "tiny-llama"
    model = Transformer(_config(name), dtype=torch.float64, device="meta")
    run = parallelize(model, ParallelConfig(**values), seed=SEED)
    optimizer, results = run.optimizer(lr=0.01), []
    shards, count = shards_of(run)

    for step in range(2):
        run.step(shards, count)
        if call is not None and step == 1:
            call(run, shards)
        results.append(run.clip(0.1))
        if call is not None and step == 0:
            call(run, shards)
        optimizer.step()
        optimizer.zero_grad()
    return results + [full_tensor(parameter) for parameter in model.parameters()]


def _assert_calls_change_nothing(rank: int, values: dict[str, Any]) -> None:
    expected = _steps_with(values, None)
    calls = {"begin": CALLS["begin"]} if "ep" in values else CALLS
    for name, call in calls.items():
        for result, value in zip(_steps_with(values, call), expected, strict=True):
            assert torch.equal(result, value), name


@pytest.mark.parametrize(
    "values",
    [*({"dp": 2, "zero": zero} for zero in range(4)), {"dp": 4, "ep": 2, "ep_deterministic": True}],
    ids=str,
)
def test_calls_between_backward_and_step_change_no_bits(values: dict[str, Any]) -> None:
    threads.run(_assert_calls_change_nothing, values["dp"], values | {"microbatches": 2})


EXPERTS = {
    "ep4": {"dp": 8, "ep": 4},
    "ep2-zero3": {"dp": 8, "ep": 2, "zero": 3},
    "tp2-cp2-sp-ep2-zero1": {"dp": 2, "cp": 2, "tp": 2, "sp": True, "ep": 2, "zero": 1},
    "tp2-ep2-recompute": {"dp": 4, "tp": 2, "ep": 2, "recompute": "full", "microbatches": 2},
}


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_on_processes(on_processes: OnProcesses, case: str) -> None:
    on_processes(_assert_parity, 8, "tiny-mixtral", EXPERTS[case])


@pytest.mark.distributed
def test_all_modes_on_processes(on_processes: OnProcesses) -> None:
    values = {"dp": 2, "cp": 2, "tp": 2, "sp": True, "zero": 3, "recompute": "full"}
    on_processes(_assert_parity, 8, "tiny-llama", values)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("zero", [0, 3])
@on_threads(2)
def test_a_model_that_calls_the_primitives_itself(rank: int, zero: int) -> None:
    """Mode ``manual`` leaves the model as it is, and sums its gradients."""
    torch.manual_seed(0)
    whole = _Plain()
    mine = copy.deepcopy(whole)
    run = parallelize(mine, ParallelConfig(dp=2, zero=zero, mode="manual"))
    x = torch.randn(6, 4, dtype=torch.float64)
    whole(x).square().sum().backward()
    mine(run.rows(x)).square().sum().backward()
    for a, b in zip(mine.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(a.grad), b.grad)


@on_threads(6)
def test_what_does_not_fit_is_told_with_what_would(rank: int) -> None:
    model = Transformer(_config("tiny-llama"), device="meta")
    sparse = Transformer(_config("tiny-mixtral"), device="meta")
    wrong = [
        (model, {"dp": 3}, "dp x tp x pp x cp = 3 x 1 x 1 x 1 = 3 must be the 6 processes"),
        (model, {"dp": 3}, "dp 6 or tp 2 or pp 2 or cp 2 would fit"),
        (
            model,
            {"tp": 3, "dp": 2},
            r"tp must be a divisor of the heads, 4, got 3 \(1, 2, 4 would fit",
        ),
        (sparse, {"dp": 6, "ep": 3}, "ep must be a divisor of the 4 experts, got 3"),
        (model, {"dp": 3, "ep": 3, "tp": 2}, "ep must be 1 for a model without experts"),
        (model, {"cp": 3, "dp": 2, "context": "all_to_all"}, "cp must be a divisor of the 4 heads"),
        (model, {"dp": 6, "zero": 1, "shard_ranks": 4}, "shard_ranks must be a divisor of dp x cp"),
        (model, {"dp": 6, "bucket_layers": (2,)}, "bucket_layers must be below the 2 layers"),
    ]
    for refused, values, says in wrong:
        with pytest.raises(ValueError, match=says):
            parallelize(refused, ParallelConfig(**values))
    stretched = _config("tiny-llama", rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    with pytest.raises(UnsupportedError, match="cp must be 1 with rope_scaling of kind 'dynamic'"):
        parallelize(Transformer(stretched, device="meta"), ParallelConfig(dp=3, cp=2))
    with pytest.raises(ValueError, match="at most the 2 layers, got 3"):
        parallelize(model, ParallelConfig(dp=2, pp=3))
    with pytest.raises(TypeError, match="fusedops.models.Transformer, or any module with mode"):
        parallelize(nn.Linear(2, 2), ParallelConfig(dp=6))
    with pytest.raises(TypeError, match="config must be a ParallelConfig, got dict"):
        parallelize(model, {"dp": 6})  # type: ignore[arg-type]
    run = parallelize(model, ParallelConfig(dp=3, tp=2, sp=True))
    with pytest.raises(ValueError, match="a multiple of 2, for the ranks of cp 1 and tp 2, got 3"):
        run.shard_batch(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="a multiple of dp = 3 sequences, got 4"):
        run.rows(torch.zeros(4, 2))


def test_without_torch_distributed_it_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="parallelize: torch.distributed is not initialised"):
        parallelize(Transformer(_config("tiny-llama"), device="meta"), ParallelConfig(dp=2))


def _compiled(rank: int, name: str, values: dict[str, Any]) -> float:
    """Return the largest difference of loss and gradients between a compiled model and itself."""
    config = _config(name, num_layers=1, dropout=0.2, attention_dropout=0.2)
    model = Transformer(config, dtype=torch.float64, device="meta")
    run, found = parallelize(model, ParallelConfig(**values), seed=SEED), []
    (shard,), count = shards_of(run)
    # With overlap compiled code takes the batch whole: what is traced matters.
    backend = "eager" if "overlap_microbatches" in values else "aot_eager"
    for call in (model, torch.compile(model, backend=backend)):
        output = call(*shard[:2], positions=shard.positions, seed=torch.tensor([1, 2]))
        loss = run.loss(output, count)
        loss.backward()
        grads = [full_tensor(parameter.grad) for parameter in model.parameters()]
        found.append([loss.detach(), *grads])
        model.zero_grad()
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


# Communications break the graph: between two of them a compiler has what it may.
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tiny-mixtral", {"dp": 2, "ep": 2, "overlap_microbatches": True}),
        # tests/parallel/test_compile.py compiles dispatch, experts and combine.
        *(
            pytest.param(name, values, marks=pytest.mark.slow)
            for name, values in (
                ("tiny-llama", {"tp": 2, "sp": True}),
                ("tiny-gpt2", {"tp": 2}),
                ("tiny-gpt2", {"tp": 2, "overlap_microbatches": True}),
                ("tiny-mixtral", {"dp": 2, "ep": 2}),
            )
        ),
    ],
    ids=str,
)
def test_a_parallel_model_compiles(on_processes: OnProcesses, name: str, values: Any) -> None:
    assert max(on_processes(_compiled, 2, name, values)) < 1e-12
