"""Attention over sharded sequences equals one process: values, gradients, bytes, bad input.

Most ranks are threads; what processes do differently, messages under way, is tried on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from context_cases import (
    CASES,
    Case,
    assert_as_one_process,
    gradients,
    in_shards,
    on_one_process,
    problem,
    shard,
)
from run_ranks import on_threads
from torch import distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fusedops
from fusedops import UnsupportedError, memory
from fusedops._core import dtypes, philox
from fusedops.parallel import (
    context_core,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from fusedops.parallel.comm import collectives
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnProcesses = Callable[..., list[Any]]
FUNCTIONS = {"ring": ring_attention, "all_to_all": ulysses_attention}


@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        ("ring", 1, torch.float32),
        ("ring", 2, torch.float64),
        ("ring", 3, torch.float32),
        ("ring", 4, torch.float64),
        ("ring", 4, torch.bfloat16),
        ("all_to_all", 2, torch.bfloat16),
        ("all_to_all", 4, torch.float64),
    ],
    ids=lambda each: str(each).removeprefix("torch."),
)
@on_threads("ranks")
def test_shards_equal_one_process(rank: int, kind: str, ranks: int, dtype: torch.dtype) -> None:
    for case in CASES.values():
        if case.length % ranks == 0:
            assert_as_one_process(FUNCTIONS[kind], dist.group.WORLD, case, dtype)


def _as_one_process(rank: int, names: tuple[str, ...], dtype: torch.dtype, *kinds: str) -> None:
    for name in names:
        for kind in kinds:
            assert_as_one_process(FUNCTIONS[kind], dist.group.WORLD, CASES[name], dtype)


def test_shards_on_processes_equal_one(on_processes: OnProcesses) -> None:
    names = ("causal", "window", "packed_rows")
    on_processes(_as_one_process, 4, names, torch.float32, *FUNCTIONS)


def test_ring_runs_on_the_reference() -> None:
    """It makes probabilities again from one block alone, which is not the whole row."""
    names = ("alibi_both_sides", "sinks_softcap", "packed_rows")
    with fusedops.use_backend("torch"):
        threads.run(_as_one_process, 2, names, torch.float64, "ring")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "dtype"), [("alibi", torch.float32), ("packed_rows", torch.bfloat16)]
)
def test_ring_runs_on_triton(name: str, dtype: torch.dtype) -> None:
    with fusedops.use_backend("triton"):
        threads.run(_as_one_process, 2, (name,), dtype, "ring")


@on_threads(2)
def test_large_scores_keep_their_sums(rank: int) -> None:
    """With the log-sum-exp in one number gradients would be off by as much as scores are large."""
    case, group = Case(options={"is_causal": True, "scale": 300.0}), dist.group.WORLD
    found = in_shards(ring_attention, group, case, torch.float32)
    alone, truth = on_one_process(case, torch.float32), on_one_process(case, torch.float64)
    for mine, eager, exact in zip(found, alone, truth, strict=True):
        eager, exact = (shard(each, case, group) for each in (eager, exact))
        budget = dtypes.rms_budget(eager, exact, torch.float32, depth=case.length)
        assert dtypes.rms(mine.double() - exact) <= budget


@on_threads(2)
def test_second_derivatives_are_right_or_refused(rank: int) -> None:
    case, group = Case(options={"is_causal": True}, length=8), dist.group.WORLD
    inputs = [shard(each, case, group) for each in problem(case, torch.float64)[:3]]
    query = inputs[0].requires_grad_()

    def slope(function: Callable[..., Any]) -> torch.Tensor:
        output = function(*inputs, group, is_causal=True).square().sum()
        return torch.autograd.grad(output, query, create_graph=True)[0]

    with pytest.raises(UnsupportedError, match="has no second derivative"):
        slope(ring_attention).sum().backward()
    (found,) = torch.autograd.grad(slope(ulysses_attention).sum(), query)
    whole = [each.requires_grad_() for each in problem(case, torch.float64)[:3]]
    output = fusedops.attention(*whole, is_causal=True).square().sum()
    (first,) = torch.autograd.grad(output, whole[0], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), whole[0])
    expected = shard(second, case, group)
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=case.length)
    assert bool(((found - expected).abs() <= budget).all())


@on_threads(4)
def test_keys_and_gradients_travel_beside_the_computation(rank: int) -> None:
    case = Case(options={"is_causal": True}, length=32, key_heads=2, value_size=12)
    with collectives.recorded() as log:
        in_shards(ring_attention, dist.group.WORLD, case, torch.float32)
    beside = log.overlapped()
    for step in range(1, 4):
        assert (f"keys {step}", f"attend {step - 1}") in beside
        assert (f"keys {step}", f"differentiate {step - 1}") in beside
    for step in (1, 2):
        assert (f"gradients {step}", f"differentiate {step + 1}") in beside


def _dropped(rank: int, kind: str, dtype: torch.dtype, *names: str) -> None:
    """Compare with dropout; ``"placed"`` is a part of a larger batch, after two sequences."""
    seed = torch.tensor([2**50 + 3, 8])
    for name in names:
        case, place = CASES["causal" if name == "placed" else name], seed
        if name == "placed":
            square = case.length**2
            place = torch.cat((seed, torch.tensor((2 * 8 * square, 8 * square, square))))
        with_seed = _with(case, dropout_p=0.3, seed=place)
        assert_as_one_process(FUNCTIONS[kind], dist.group.WORLD, with_seed, dtype)


def _with(case: Case, **more: Any) -> Case:
    return replace(case, options={**case.options, **more})


DROPPED = ("causal_contiguous", "grouped_heads", "alibi", "long", "packed_document", "packed_rows")


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_shards_drop_what_one_process_does(kind: str) -> None:
    threads.run(_dropped, 2, kind, torch.float64, *DROPPED, "placed")


def test_a_ring_of_four_drops_what_one_process_does() -> None:
    """Of two ranks each receives the keys of the one that it sends its own to."""
    threads.run(_dropped, 4, "ring", torch.float64, "grouped_heads")


@pytest.mark.parametrize(
    ("backend", "dtype", "names"),
    [
        ("torch", torch.float64, DROPPED),
        pytest.param(
            *("triton", torch.float32, ("causal_contiguous", "packed_rows")),
            marks=pytest.mark.interpreter,
        ),
    ],
)
def test_ring_drops_on_other_backends_too(
    backend: str, dtype: torch.dtype, names: tuple[str, ...]
) -> None:
    with fusedops.use_backend(backend):
        threads.run(_dropped, 2, "ring", dtype, *names)


@pytest.mark.parametrize("kind", FUNCTIONS)
@on_threads(2)
def test_without_a_seed_ranks_take_that_of_the_first(rank: int, kind: str) -> None:
    """However their generators were seeded."""
    torch.manual_seed(0)
    first, results = philox.new_seed(torch.device("cpu")), []
    for seed in (None, first):
        torch.manual_seed(rank)
        case = _with(CASES["causal"], dropout_p=0.3, seed=seed)
        results.append(in_shards(FUNCTIONS[kind], dist.group.WORLD, case, torch.float64))
    for drawn, given in zip(*results, strict=True):
        assert torch.equal(drawn, given)


def _compiled(rank: int) -> None:
    case, group = CASES["causal"], dist.group.WORLD
    for function in FUNCTIONS.values():

        def doubled(*inputs: torch.Tensor, function: Any = function, **options: Any) -> Any:
            return function(*(2 * each for each in inputs), group, **options)

        compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
        tensors = [shard(each, case, group) for each in problem(case, torch.float32)[:5]]
        rest = problem(case, torch.float32)[5:]
        eager, found = (gradients(each, case, [*tensors, *rest]) for each in (doubled, compiled))
        for ours, expected in zip(found, eager, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.slow
def test_both_compile_to_one_graph(on_processes: OnProcesses) -> None:
    on_processes(_compiled, 2)


class _Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core, self.scale = context_core(group), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x * self.scale, x, x, is_causal=True)


@on_threads(2)
def test_a_policy_keeps_the_ring_out_of_the_second_forward(rank: int) -> None:
    """By the messages of keys under three policies."""
    grads = []
    attention = memory.save(ops="ring_attention")
    for rules, count in (
        ([], 2),
        ([memory.recompute("0")], 3),
        ([memory.recompute("0"), attention], 2),
    ):
        model = nn.Sequential(_Layer(dist.group.WORLD))
        memory.apply(model, memory.Policy(*rules))
        x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(rank))
        with collectives.recorded() as log:
            model(x.requires_grad_()).square().sum().backward()
        assert sum(call.label.startswith("keys") for call in log.calls) == count
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@on_threads(2)
def test_flops_are_this_rank_s_share(rank: int) -> None:
    case, counts = CASES["causal"], []
    for run in (
        lambda: in_shards(ring_attention, dist.group.WORLD, case, torch.float32),
        lambda: on_one_process(case, torch.float32),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] // 2


@on_threads(4)
def test_shards_join_to_the_whole(rank: int) -> None:
    group = dist.group.WORLD
    tokens = torch.arange(2 * 24).view(2, 24)
    ends = torch.tensor([0, 7, 24, 24, 41, 48])
    for balance in ("zigzag", "document", "contiguous"):
        options: dict[str, Any] = {"balance": balance, "cu_seqlens": ends}
        mine = shard_sequence(tokens, group, **options)
        assert mine.shape == (2, 6) and bool((mine.diff() > 0).all())
        assert torch.equal(unshard_sequence(mine, group, **options), tokens)
    whole = torch.arange(2.0 * 3 * 24 * 5).view(2, 3, 24, 5)
    mine = shard_sequence(whole, group, 2).requires_grad_()
    joined = unshard_sequence(mine, group, -2)
    assert torch.equal(joined, whole)
    joined.backward(whole * (rank + 1))  # each rank uses it in its own way
    assert torch.equal(mine.grad, shard_sequence(whole * (1 + 2 + 3 + 4), group, 2))
    places = shard_sequence(torch.arange(24), group, 0)
    assert torch.equal(whole[:, :, places], mine)


@on_threads(2)
def test_bad_input_is_refused_before_anything_is_sent(rank: int) -> None:
    group, ring = dist.group.WORLD, ring_attention
    q, three = torch.zeros(1, 4, 6, 8), torch.zeros(1, 3, 6, 8)
    few, whole = q[:, :2], (q, q, q, group)
    slopes, ends = torch.ones(1, 4), torch.tensor([0, 6])
    packed = {"alibi_slopes": slopes, "cu_seqlens": [0, 5, 12]}
    wrong: list[tuple[type[Exception], str, Any, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "group must be a torch.distributed.Pro", ring, (q, q, q, 3), {}),
        (ValueError, "query must be of 4 dims", ring, (q[0], q[0], q[0], group), {}),
        (ValueError, "key must be of shape .1, 4, 6, 8.", ring, (q, q[:, :, :4], q, group), {}),
        (ValueError, "unless enable_gqa=True", ring, (q, few, few, group), {}),
        (ValueError, "balance must be one of", ring, whole, {"balance": "even"}),
        (ValueError, "window", ring, whole, {"window": 3}),
        (ValueError, "cu_seqlens must be from 0 to 12", ring, whole, {"cu_seqlens": ends}),
        (UnsupportedError, "alibi_slopes must be .4. with cu_seqlens", ring, whole, packed),
        (ValueError, "2 ranks divide, got 3", ulysses_attention, (*[three] * 3, group), {}),
        (ValueError, "kind must be one of", context_core, (group, "rings"), {}),
        (ValueError, "2 ranks divide, got 3", shard_sequence, (q[0, 0, :3], group, 0), {}),
        (ValueError, "dim must be one of", shard_sequence, (q, group, 4), {}),
    ]
    for kind, words, function, args, options in wrong:
        with pytest.raises(kind, match=words):
            function(*args, **options)
