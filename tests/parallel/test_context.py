"""Attention over sharded sequences equals one process: values, gradients, bytes, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_cases import CASES, Case, gradients, in_shards, on_one_process, problem, shard
from process_pool import World
from torch import distributed as dist

import fusedops
from fusedops import UnsupportedError
from fusedops._core import dtypes
from fusedops.parallel import (
    communication,
    context_core,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from fusedops.parallel.context import plan
from fusedops.parallel.context.layout import ranges
from fusedops.parallel.context.plan import Pattern

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
FUNCTIONS = {"ring": ring_attention, "all_to_all": ulysses_attention}


def _check_case(world: World, kind: str, name: str, ranks: int, dtype: torch.dtype) -> None:
    case = CASES[name]
    found = in_shards(FUNCTIONS[kind], world, case, ranks, dtype)
    alone, truth = on_one_process(case, dtype), on_one_process(case, torch.float64)
    for i, (mine, eager, exact) in enumerate(zip(found, alone, truth, strict=True)):
        if i < 5:
            eager, exact = (shard(each, case, world.rank, ranks) for each in (eager, exact))
        else:  # of the sinks: each rank has a part
            dist.all_reduce(mine, group=world.group(ranks))
        budget = dtypes.error_budget(eager, exact, dtype, depth=case.length)
        error = (mine.double() - exact).abs()
        where = f"{kind} {name} on {ranks}, {dtype}: result {i} of rank {world.rank}"
        assert bool((error <= budget).all()), f"{where}: off by {float(error.max())}"


def _equal(world: World, kind: str, ranks: int, dtype: torch.dtype) -> None:
    if world.member(ranks):
        for name in CASES:
            _check_case(world, kind, name, ranks, dtype)


@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        ("ring", 1, torch.float64),
        ("ring", 2, torch.float32),
        ("ring", 4, torch.float64),
        ("ring", 4, torch.bfloat16),
        ("all_to_all", 2, torch.bfloat16),
        ("all_to_all", 4, torch.float64),
    ],
    ids=lambda each: str(each).removeprefix("torch."),
)
def test_shards_equal_one_process(
    on_ranks: OnRanks, kind: str, ranks: int, dtype: torch.dtype
) -> None:
    on_ranks(_equal, kind, ranks, dtype)


def _on_the_reference(world: World) -> None:
    if world.member(2):
        with fusedops.use_backend("torch"):
            for name in ("alibi_both_sides", "sinks_softcap", "packed_rows"):
                _check_case(world, "ring", name, 2, torch.float64)


def test_ring_runs_on_the_reference(on_ranks: OnRanks) -> None:
    """It makes probabilities again from one block alone, which is not the whole row."""
    on_ranks(_on_the_reference)


def _large_scores(world: World) -> None:
    """Sums of one number would be off by as much as all scores are large."""
    if not world.member(2):
        return
    case = Case(options={"is_causal": True, "scale": 300.0})
    found = in_shards(ring_attention, world, case, 2, torch.float32)
    alone, truth = on_one_process(case, torch.float32), on_one_process(case, torch.float64)
    for mine, eager, exact in zip(found, alone, truth, strict=True):
        eager, exact = (shard(each, case, world.rank, 2) for each in (eager, exact))
        limit = 4 * dtypes.rms_budget(eager, exact, torch.float32, depth=case.length)
        assert dtypes.rms(mine.double() - exact) <= limit


def test_large_scores_keep_their_sums(on_ranks: OnRanks) -> None:
    on_ranks(_large_scores)


def _logged(world: World) -> tuple[Any, ...]:
    """Return what a causal step on four ranks sent, and what ran beside what."""
    if not world.member(4):
        return ()
    case = Case(options={"is_causal": True}, length=32, key_heads=2, value_size=12)
    with communication.recorded() as log:
        in_shards(ring_attention, world, case, 4, torch.float32)
    ring = {
        word: sum(each.bytes for each in log.calls if each.label.startswith(word))
        for word in ("keys", "gradients")
    }
    with communication.recorded() as other:
        in_shards(ulysses_attention, world, case, 4, torch.float32)
    return ring, log.beside(), other.bytes(), other.counts()


def test_bytes_are_those_of_the_plan_and_travel_beside_the_computation(on_ranks: OnRanks) -> None:
    case = Case(options={"is_causal": True}, length=32, key_heads=2, value_size=12)
    layout = case.layout(4)._replace(ends=(0, 32))
    token = case.batch * case.key_heads * (case.size + case.value_size) * 4
    logged = on_ranks(_logged)[:4]
    for rank, (ring, beside, exchanged, counts) in enumerate(logged):
        others = [other for other in range(4) if other != rank]
        causal = Pattern(-1, 0)
        keys = [plan.step(layout, causal, other, rank).tokens * token for other in others]
        back = [plan.step(layout, causal, rank, other).tokens * token for other in others]
        assert ring == {"keys": 2 * sum(keys), "gradients": sum(back)}  # keys again in the backward
        for step in range(1, 4):
            assert (f"keys {step}", f"attend {step - 1}") in beside
            assert (f"keys {step}", f"differentiate {step - 1}") in beside
        for step in (1, 2):
            assert (f"gradients {step}", f"differentiate {step + 1}") in beside
        # Queries, keys (a head for each rank), values and outputs; of each 3 / 4 leave; and back.
        sizes = case.heads * (2 * case.size + 2 * case.value_size) + case.heads  # and log-sum-exps
        assert exchanged == 2 * case.batch * 8 * sizes * 4 * 3 // 4
        assert counts == {"all_to_all": 6}
    assert sum(each[0]["keys"] for each in logged) == 2 * 4 * 3 * 8 * token * 3 // 4


_DROPOUT = Case(batch=1, length=32)


def _dropped(world: World) -> dict[str, torch.Tensor]:
    """Return the factors that dropout gave each weight, of equal scores and of values that show."""
    if not world.member(2):
        return {}
    share, length, found = 16, 32, {}
    zeros, ones = torch.zeros(1, 2, share, 4), torch.eye(length)[None, None].repeat(1, 2, 1, 1)
    for kind, function in FUNCTIONS.items():
        torch.manual_seed(3)
        values = shard_sequence(ones, world.group(2), 2)
        found[kind] = length * function(zeros, zeros, values, world.group(2), dropout_p=0.5)
    return found


def test_dropout_draws_for_each_block_and_head(on_ranks: OnRanks) -> None:
    results = on_ranks(_dropped)[:2]
    for kind in FUNCTIONS:
        blocks = [
            block.reshape(-1)
            for rank, each in enumerate(results)
            for head in each[kind][0]
            for source in range(2)
            for block in [head[:, _columns(source)]]
        ]
        for i, block in enumerate(blocks):
            assert set(block.tolist()) == {0.0, 2.0}
            assert 0.3 < float((block > 0).float().mean()) < 0.7
            assert not any(torch.equal(block, other) for other in blocks[:i])


def _columns(rank: int) -> torch.Tensor:
    """Return the tokens of a rank."""
    return torch.cat([torch.arange(*each) for each in ranges(_DROPOUT.layout(2), rank)])


def _slope(world: World, kind: str) -> None:
    """Compare gradients under dropout with a difference quotient."""
    if not world.member(2):
        return
    case = Case(options={"is_causal": True, "dropout_p": 0.3}, key_heads=2)
    *tensors, grad, grad_lse, slopes, sinks = problem(case, torch.float64)
    mine = [shard(each, case, world.rank, 2) for each in (*tensors, grad, grad_lse)]
    group = world.group(2)

    def attend(*inputs: torch.Tensor, **options: Any) -> Any:
        torch.manual_seed(5)
        return FUNCTIONS[kind](*inputs, group, **options)

    found = gradients(attend, case, [*mine, slopes, sinks])[2:]
    ways = [torch.randn_like(each) for each in found]
    step = 2.0**-17
    totals = []
    for sign in (-1, 1):
        inputs = [each + sign * step * way for each, way in zip(mine, ways, strict=False)]
        output, lse = gradients(attend, case, [*inputs, *mine[3:], slopes, sinks])[:2]
        totals.append((output * mine[3]).sum() + (lse * mine[4]).sum())
    sums = torch.stack(
        [
            (totals[1] - totals[0]) / (2 * step),
            sum((grad * way).sum() for grad, way in zip(found, ways, strict=True)),
        ]
    )
    dist.all_reduce(sums, group=group)
    torch.testing.assert_close(sums[0], sums[1])


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_dropout_is_the_same_in_the_backward(on_ranks: OnRanks, kind: str) -> None:
    on_ranks(_slope, kind)


def _cut_and_joined(world: World) -> None:
    if not world.member(4):
        return
    group = world.group(4)
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
    joined.backward(whole * (world.rank + 1))  # each rank uses it in its own way
    assert torch.equal(mine.grad, shard_sequence(whole * (1 + 2 + 3 + 4), group, 2))
    places = shard_sequence(torch.arange(24), group, 0)
    assert torch.equal(whole[:, :, places], mine)


def test_shards_join_to_the_whole(on_ranks: OnRanks) -> None:
    on_ranks(_cut_and_joined)


class _Documents:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids_BS = ids


def _core(world: World, kind: str) -> None:
    if not world.member(2):
        return
    case, group = CASES["packed_rows"], world.group(2)
    truth = on_one_process(case, torch.float64)[0]
    places = torch.arange(case.batch * case.length)
    ids = torch.searchsorted(torch.tensor(case.ends), places, right=True).view(case.batch, -1)
    documents = _Documents(shard_sequence(ids, group))
    inputs = [shard(each, case, world.rank, 2) for each in problem(case, torch.float64)[:3]]
    core = context_core(group, kind)
    options: dict[str, Any] = {"window": None, "alibi_slopes": None, "dropout_p": 0.0}
    with communication.recorded() as log:
        for _ in range(2):  # two layers
            output = core(*inputs, is_causal=True, documents=documents, **options)
    expected = shard(truth, case, world.rank, 2)
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=case.length)
    assert bool(((output - expected).abs() <= budget).all())
    assert log.counts()["all_gather"] == 1, "documents are told once for all layers"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_core_finds_the_documents_of_shards(on_ranks: OnRanks, kind: str) -> None:
    on_ranks(_core, kind)


def _refused(world: World) -> None:
    if not world.member(2):
        return
    group = world.group(2)
    q, three = torch.zeros(1, 4, 6, 8), torch.zeros(1, 3, 6, 8)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "group must be a torch.distributed.Pro", lambda: ring_attention(q, q, q, 3)),
        (ValueError, "query must be of 4 dims", lambda: ring_attention(q[0], q[0], q[0], group)),
        (
            ValueError,
            "key must be of shape .1, 4, 6, 8.",
            lambda: ring_attention(q, q[:, :, :4], q, group),
        ),
        (
            ValueError,
            "unless enable_gqa=True",
            lambda: ring_attention(q, q[:, :2], q[:, :2], group),
        ),
        (
            ValueError,
            "balance must be one of",
            lambda: ring_attention(q, q, q, group, balance="even"),
        ),
        (ValueError, "window", lambda: ring_attention(q, q, q, group, window=3)),
        (
            ValueError,
            "cu_seqlens must be from 0 to 12",
            lambda: ring_attention(q, q, q, group, cu_seqlens=torch.tensor([0, 6])),
        ),
        (
            UnsupportedError,
            "alibi_slopes must be .4. beside",
            lambda: ring_attention(
                q, q, q, group, alibi_slopes=torch.ones(1, 4), cu_seqlens=[0, 5, 12]
            ),
        ),
        (
            ValueError,
            "query must be of a number of heads that 2 ranks divide, got 3",
            lambda: ulysses_attention(three, three, three, group),
        ),
        (ValueError, "kind must be one of", lambda: context_core(group, "rings")),
        (
            ValueError,
            "the sequence must be of a length that 2 ranks divide, got 3",
            lambda: shard_sequence(q[0, 0, :3], group, 0),
        ),
        (ValueError, "dim must be one of", lambda: shard_sequence(q, group, 4)),
    ]
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()


def test_bad_input_is_refused_before_anything_is_sent(on_ranks: OnRanks) -> None:
    on_ranks(_refused)
