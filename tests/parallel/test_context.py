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
from process_pool import World
from torch import distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fusedops
from fusedops import UnsupportedError, memory
from fusedops._core import dtypes, philox
from fusedops.models import Transformer, preset
from fusedops.parallel import (
    context_core,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from fusedops.parallel.comm import collectives
from fusedops.parallel.context import plan
from fusedops.parallel.context.plan import ContextPattern
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
FUNCTIONS = {"ring": ring_attention, "all_to_all": ulysses_attention}


def _all_cases(rank: int, kind: str, dtype: torch.dtype) -> None:
    for case in CASES.values():
        if case.length % dist.get_world_size() == 0:
            assert_as_one_process(FUNCTIONS[kind], dist.group.WORLD, case, dtype)


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
def test_shards_equal_one_process(kind: str, ranks: int, dtype: torch.dtype) -> None:
    threads.run(_all_cases, ranks, kind, dtype)


def _some_cases(world: World) -> None:
    if world.member(4):
        for name in ("causal", "window", "packed_rows"):
            for function in FUNCTIONS.values():
                assert_as_one_process(function, world.group(4), CASES[name], torch.float32)


def test_shards_on_processes_equal_one(on_ranks: OnRanks) -> None:
    on_ranks(_some_cases)


def _on_the_reference(rank: int) -> None:
    for name in ("alibi_both_sides", "sinks_softcap", "packed_rows"):
        assert_as_one_process(ring_attention, dist.group.WORLD, CASES[name], torch.float64)


def test_ring_runs_on_the_reference() -> None:
    """It makes probabilities again from one block alone, which is not the whole row."""
    with fusedops.use_backend("torch"):
        threads.run(_on_the_reference, 2)


def _on_triton(rank: int) -> None:
    for name, dtype in (("alibi", torch.float32), ("packed_rows", torch.bfloat16)):
        assert_as_one_process(ring_attention, dist.group.WORLD, CASES[name], dtype)


@pytest.mark.interpreter
def test_ring_runs_on_triton() -> None:
    with fusedops.use_backend("triton"):
        threads.run(_on_triton, 2)


def _large_scores(rank: int) -> None:
    case, group = Case(options={"is_causal": True, "scale": 300.0}), dist.group.WORLD
    found = in_shards(ring_attention, group, case, torch.float32)
    alone, truth = on_one_process(case, torch.float32), on_one_process(case, torch.float64)
    for mine, eager, exact in zip(found, alone, truth, strict=True):
        eager, exact = (shard(each, case, group) for each in (eager, exact))
        budget = dtypes.rms_budget(eager, exact, torch.float32, depth=case.length)
        assert dtypes.rms(mine.double() - exact) <= budget


def test_large_scores_keep_their_sums() -> None:
    """With the log-sum-exp in one number gradients would be off by as much as scores are large."""
    threads.run(_large_scores, 2)


def _twice(rank: int) -> None:
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


def test_second_derivatives_are_right_or_refused() -> None:
    threads.run(_twice, 2)


def _logged(world: World) -> tuple[Any, ...]:
    """Return what a causal step on four ranks sent, and what ran beside what."""
    if not world.member(4):
        return ()
    case = Case(options={"is_causal": True}, length=32, key_heads=2, value_size=12)
    with collectives.recorded() as log:
        in_shards(ring_attention, world.group(4), case, torch.float32)
    ring = {
        word: sum(call.bytes for call in log.calls if call.label.startswith(word))
        for word in ("keys", "gradients")
    }
    with collectives.recorded() as other:
        in_shards(ulysses_attention, world.group(4), case, torch.float32)
    return ring, log.overlapped(), other.bytes(), other.counts()


def test_bytes_are_those_of_the_plan_and_travel_beside_the_computation(on_ranks: OnRanks) -> None:
    case = Case(options={"is_causal": True}, length=32, key_heads=2, value_size=12)
    layout = case.layout(4)._replace(ends=(0, 32))
    token = case.batch * case.key_heads * (case.size + case.value_size) * 4
    logged = on_ranks(_logged)[:4]
    for rank, (ring, beside, exchanged, counts) in enumerate(logged):
        others = [other for other in range(4) if other != rank]
        causal = ContextPattern(-1, 0)
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


def _dropped(rank: int, kind: str) -> None:
    dropout = {"dropout_p": 0.3, "seed": torch.tensor([2**50 + 3, 8])}
    names = ("causal_contiguous", "grouped_heads", "alibi", "packed_document", "packed_rows")
    for case in (CASES[name] for name in names):
        assert_as_one_process(
            FUNCTIONS[kind], dist.group.WORLD, _with(case, **dropout), torch.float64
        )
    # Heads of a part of a larger batch, which has two sequences before these.
    case = CASES["causal"]
    square = case.length**2
    place = torch.tensor((2 * 8 * square, 8 * square, square))
    dropout["seed"] = torch.cat((dropout["seed"], place))
    assert_as_one_process(FUNCTIONS[kind], dist.group.WORLD, _with(case, **dropout), torch.float64)
    # Without a seed all ranks take that of the first, however their generators were seeded.
    torch.manual_seed(0)
    first, results = philox.new_seed(torch.device("cpu")), []
    for seed in (None, first):
        torch.manual_seed(rank)
        with_seed = _with(case, dropout_p=0.3, seed=seed)
        results.append(in_shards(FUNCTIONS[kind], dist.group.WORLD, with_seed, torch.float64))
    for drawn, given in zip(*results, strict=True):
        assert torch.equal(drawn, given)


def _with(case: Case, **more: Any) -> Case:
    return replace(case, options={**case.options, **more})


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_shards_drop_what_one_process_does(kind: str) -> None:
    threads.run(_dropped, 2, kind)


def _dropped_in_a_ring(rank: int) -> None:
    case = _with(CASES["grouped_heads"], dropout_p=0.3, seed=torch.tensor([2**50 + 3, 8]))
    assert_as_one_process(FUNCTIONS["ring"], dist.group.WORLD, case, torch.float64)


def test_a_ring_of_four_drops_what_one_process_does() -> None:
    """Of two ranks each receives the keys of the one that it sends its own to."""
    threads.run(_dropped_in_a_ring, 4)


def test_ring_drops_on_the_reference_too() -> None:
    with fusedops.use_backend("torch"):
        threads.run(_dropped, 2, "ring")


def _compiled(world: World) -> None:
    if not world.member(2):
        return
    case, group = CASES["causal"], world.group(2)
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
def test_both_compile_to_one_graph(on_ranks: OnRanks) -> None:
    on_ranks(_compiled)


class _Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core, self.scale = context_core(group), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x * self.scale, x, x, is_causal=True)


def _recomputed(rank: int) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Return the messages of keys under three policies, and the gradients."""
    messages, grads = {}, []
    rules = {
        "kept": [],
        "recomputed": [memory.recompute("0")],
        "but attention": [memory.recompute("0"), memory.save(ops="ring_attention")],
    }
    for name, rule in rules.items():
        model = nn.Sequential(_Layer(dist.group.WORLD))
        memory.apply(model, memory.Policy(*rule))
        x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(rank))
        with collectives.recorded() as log:
            model(x.requires_grad_()).square().sum().backward()
        messages[name] = sum(call.label.startswith("keys") for call in log.calls)
        grads.append(x.grad)
    return messages, grads


def test_a_policy_keeps_the_ring_out_of_the_second_forward() -> None:
    for messages, grads in threads.run(_recomputed, 2):
        assert messages == {"kept": 2, "recomputed": 3, "but attention": 2}
        assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def _counted(rank: int) -> int:
    case = CASES["packed"]
    with FlopCounterMode(display=False) as counter:
        in_shards(ring_attention, dist.group.WORLD, case, torch.float32)
    return counter.get_total_flops()


def test_flops_are_this_rank_s_share() -> None:
    case = CASES["packed"]
    with FlopCounterMode(display=False) as counter:
        *inputs, grad, grad_lse, slopes, sinks = problem(case, torch.float32)
        q, k, v = (each[0].transpose(0, 1) for each in inputs)
        ends = torch.tensor(case.ends)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
            options.pop("enable_gqa")
            return fusedops.attention_varlen(q, k, v, ends, ends, 18, 18, **options)

        gradients(attend, case, [q, k, v, grad[0].transpose(0, 1), grad_lse[0], slopes, sinks])
    assert threads.run(_counted, 2) == [counter.get_total_flops() // 2] * 2


def _cut_and_joined(rank: int) -> None:
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


def test_shards_join_to_the_whole() -> None:
    threads.run(_cut_and_joined, 4)


class _Documents:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids_BS = ids


def _core(rank: int, kind: str) -> None:
    case, group = CASES["packed_rows"], dist.group.WORLD
    truth = on_one_process(case, torch.float64)[0]
    places = torch.arange(case.batch * case.length)
    ids = torch.searchsorted(torch.tensor(case.ends), places, right=True).view(case.batch, -1)
    documents = _Documents(shard_sequence(ids, group))
    inputs = [shard(each, case, group) for each in problem(case, torch.float64)[:3]]
    core = context_core(group, kind)
    options: dict[str, Any] = {"window": None, "alibi_slopes": None, "dropout_p": 0.0}
    with collectives.recorded() as log:
        for _ in range(2):  # two layers
            output = core(*inputs, is_causal=True, documents=documents, **options)
    expected = shard(truth, case, group)
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=case.length)
    assert bool(((output - expected).abs() <= budget).all())
    assert log.counts()["all_gather"] == 1, "documents are told once for all layers"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_core_finds_the_documents_of_shards(kind: str) -> None:
    threads.run(_core, 2, kind)


def _refused(rank: int) -> None:
    group, ring = dist.group.WORLD, ring_attention
    q, three = torch.zeros(1, 4, 6, 8), torch.zeros(1, 3, 6, 8)
    few, whole = q[:, :2], (q, q, q, group)
    slopes, ends = torch.ones(1, 4), torch.tensor([0, 6])
    wrong: list[tuple[type[Exception], str, Any, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "group must be a torch.distributed.Pro", ring, (q, q, q, 3), {}),
        (ValueError, "query must be of 4 dims", ring, (q[0], q[0], q[0], group), {}),
        (ValueError, "key must be of shape .1, 4, 6, 8.", ring, (q, q[:, :, :4], q, group), {}),
        (ValueError, "unless enable_gqa=True", ring, (q, few, few, group), {}),
        (ValueError, "balance must be one of", ring, whole, {"balance": "even"}),
        (ValueError, "window", ring, whole, {"window": 3}),
        (ValueError, "cu_seqlens must be from 0 to 12", ring, whole, {"cu_seqlens": ends}),
        (
            UnsupportedError,
            "alibi_slopes must be .4. with cu_seqlens",
            ring,
            whole,
            {"alibi_slopes": slopes, "cu_seqlens": [0, 5, 12]},
        ),
        (
            ValueError,
            "query must be of a number of heads that 2 ranks divide, got 3",
            ulysses_attention,
            (three, three, three, group),
            {},
        ),
        (ValueError, "kind must be one of", context_core, (group, "rings"), {}),
        (
            ValueError,
            "length that 2 ranks divide, got 3",
            shard_sequence,
            (q[0, 0, :3], group, 0),
            {},
        ),
        (ValueError, "dim must be one of", shard_sequence, (q, group, 4), {}),
    ]
    for kind, words, function, args, options in wrong:
        with pytest.raises(kind, match=words):
            function(*args, **options)


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    threads.run(_refused, 2)


def _model(name: str) -> Transformer:
    """Return a tiny model in float64, without dropout."""
    torch.manual_seed(4)
    return Transformer(
        replace(preset(name), dropout=0.0, attention_dropout=0.0), dtype=torch.float64
    )


def _loss(
    model: Transformer, cut: Callable[[torch.Tensor, int], torch.Tensor], attend: Any = None
) -> torch.Tensor:
    """Return the sum of the targets' losses of packed sequences, or of the part that is cut out."""
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(64, (2, 24), generator=g)
    ids = torch.tensor([[0] * 5 + [1] * 19, [2] * 20 + [3] * 4])
    places = torch.arange(24)
    return model(
        cut(tokens, 1),
        cut(tokens.roll(-1, 1), 1),
        positions=cut(places, 0),
        document_ids=cut(ids, 1),
        attend=attend,
    ).total


def _trained(rank: int, name: str, kind: str) -> list[torch.Tensor]:
    group = dist.group.WORLD
    model, attend = _model(name), context_core(group, kind)
    loss = _loss(model, lambda whole, dim: shard_sequence(whole, group, dim), attend)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [loss, *grads]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-alibi", "tiny-pangu"])
def test_models_train_on_shards_as_on_one_process(name: str, kind: str) -> None:
    model = _model(name)
    loss = _loss(model, lambda whole, dim: whole)
    expected = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    parts = threads.run(_trained, 2, name, kind)
    for exact, *mine in zip(expected, *parts, strict=True):
        budget = dtypes.error_budget(exact, exact, torch.float64, depth=48)
        assert bool(((sum(mine) - exact).abs() <= budget).all())
