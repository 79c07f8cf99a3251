"""Dispatch, experts and combine in one graph: the bits of eager, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_layer import CASES, HIDDEN, INNER, NUM_EXPERTS, TOP_K, problem
from process_pool import World
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from fusedops import RoutingPlan, layer_norm
from fusedops.nn import MoE
from fusedops.parallel import expert_parallel, moe_combine, moe_dispatch

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]

# Cases with the same number of tokens on every rank, in each a different number of rows.
SAME_TOKENS = ("random", "one_expert", "ties", "same_expert_twice", "sentinels", "all_dropped")
TOKENS = 6


class _Block:
    """Norm, route, dispatch, experts, combine, residual."""

    def __init__(self, world: World, size: int, max_rows: int | None = None) -> None:
        torch.manual_seed(world.rank)
        self.group, self.max_rows = world.groups[size], max_rows
        self.router = MoE(HIDDEN, INNER, NUM_EXPERTS, TOP_K).gate
        self.experts = MoE(HIDDEN, INNER, NUM_EXPERTS // size, 1).experts
        self.parameters = [*self.router.parameters(), *self.experts.parameters()]

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        """Choose as the router says."""
        normed = layer_norm(x, (HIDDEN,))
        return x + self._exchanged(normed, self.router(normed)[1])

    def given(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weigh as the router says, and choose as the test does."""
        normed = layer_norm(x, (HIDDEN,))
        probs = torch.softmax(self.router(normed)[0], 1)[:, :TOP_K]
        plan = RoutingPlan.from_choices(ids, probs, NUM_EXPERTS)
        return x + self._exchanged(normed, plan)

    def _exchanged(self, rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        arrived, local_plan, handle = moe_dispatch(rows, plan, self.group, max_rows=self.max_rows)
        return moe_combine(self.experts(arrived, local_plan), handle)


def _same(eager: Any, compiled: Any, args: tuple[torch.Tensor, ...], leaves: Any) -> None:
    """Compare values and gradients, bit for bit; ``args[0]`` is the input."""
    leaves = [args[0], *leaves]
    results = []
    for function in (eager, compiled):
        output = function(*args)
        grad = torch.arange(output.numel(), dtype=torch.float32).view(output.shape).cos()
        results.append([output, *torch.autograd.grad(output, leaves, grad)])
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        assert torch.equal(got, want), f"result {i}: other bits"


def _compiled(function: Any, backend: str = "aot_eager") -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def _adversarial(world: World, size: int, max_rows: int | None) -> int:
    if not world.member(size):
        return 1
    block = _Block(world, size, max_rows)
    step, counter = _compiled(block.given)
    for name in SAME_TOKENS:
        ids, _ = CASES[name].choose(TOKENS, NUM_EXPERTS)
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        _same(block.given, step, (x, ids.long()), block.parameters)
    return counter.frame_count


@pytest.mark.parametrize(
    ("size", "bounded"), [(1, False), (2, False), (4, False), (2, True)], ids=str
)
def test_one_graph_for_every_routing_gives_the_bits_of_eager(
    on_ranks: OnRanks, size: int, bounded: bool
) -> None:
    graphs = on_ranks(_adversarial, size, size * TOKENS * TOP_K if bounded else None)
    assert graphs == [1] * len(graphs)


def _uneven(world: World, size: int, tokens: list[int]) -> None:
    if world.member(size):
        block = _Block(world, size)
        step, counter = _compiled(block.routed)
        for _ in range(2):
            x = torch.randn(tokens[world.rank], HIDDEN, requires_grad=True)
            _same(block.routed, step, (x,), block.parameters)
        assert counter.frame_count == 1


@pytest.mark.parametrize("tokens", [[5, 0, 1, 7], [0, 0, 0, 0]], ids=str)
def test_ranks_without_tokens_compile_too(on_ranks: OnRanks, tokens: list[int]) -> None:
    on_ranks(_uneven, 4, tokens)


def _ignoring(world: World) -> None:
    """Rows that some ranks' experts ignore, and a call in expert_parallel's form."""
    if not world.member(4):
        return
    mine = problem("uneven", 4, torch.float32).part(world.rank, 4)

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows.new_ones(rows.shape) if world.rank % 2 else rows * 2

    def layer(input: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        plan = RoutingPlan.from_choices(mine.ids, probs, NUM_EXPERTS)
        # In a graph the tokens are not cut; the ranks agree all the same.
        return expert_parallel(input, plan, here, world.groups[4], chunks=3, weighted=True)

    step, _ = _compiled(layer)
    _same(layer, step, (mine.input, mine.probs), [mine.probs])


def test_ranks_whose_experts_ignore_their_rows_take_part(on_ranks: OnRanks) -> None:
    on_ranks(_ignoring)


def _float8(world: World) -> None:
    if not world.member(2):
        return
    mine = problem("uneven", 2, torch.bfloat16).part(world.rank, 2)

    def layer(input: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        plan = RoutingPlan.from_choices(mine.ids, probs, NUM_EXPERTS)
        rows, _, handle = moe_dispatch(input, plan, world.groups[2], payload="float8")
        return moe_combine(rows, handle, weighted=True)

    step, _ = _compiled(layer)
    _same(layer, step, (mine.input, mine.probs), [mine.probs])


def test_float8_payload_in_a_graph(on_ranks: OnRanks) -> None:
    on_ranks(_float8)


def _counted(world: World) -> None:
    """The handle leaves the graph; combine may stand in another one, or in none."""
    if not world.member(2):
        return
    mine = problem("sentinels", 2, torch.float32).part(world.rank, 2)
    group, plan = world.groups[2], mine.plan()
    rows, _, eager = moe_dispatch(mine.input, plan, group)
    step, _ = _compiled(lambda x, plan: moe_dispatch(x, plan, group))
    arrived, _, handle = step(mine.input, plan)
    assert torch.equal(arrived, rows)
    assert tuple(handle.rows_sent.tolist()) == eager.rows_sent
    assert tuple(handle.rows_received.tolist()) == eager.rows_received
    assert int(handle.num_dropped) == eager.num_dropped
    assert int(handle.num_dropped_in_group) == eager.num_dropped_in_group
    assert handle.row_bytes == eager.row_bytes
    assert torch.equal(moe_combine(arrived, handle), moe_combine(rows, eager))


def test_the_handle_of_a_graph_has_the_counts_as_tensors(on_ranks: OnRanks) -> None:
    on_ranks(_counted)


def _padded(world: World) -> None:
    """With a bound, eagerly: rows behind those that arrived are zeros and nobody's."""
    mine = problem("uneven", 8, torch.float32).part(world.rank, 8)
    rows, plan, handle = moe_dispatch(mine.input, mine.plan(), world.groups[8])
    wide, wide_plan, bounded = moe_dispatch(mine.input, mine.plan(), world.groups[8], max_rows=300)
    assert wide.shape == (300, HIDDEN) and torch.equal(wide[: len(rows)], rows)
    assert not wide[len(rows) :].any() and not wide_plan.probs[len(rows) :].any()
    assert torch.equal(wide_plan.offsets, plan.offsets)
    wide = torch.where(torch.arange(300)[:, None] < len(rows), wide, torch.nan)
    want, got = (
        moe_combine(each * 2, by, weighted=True) for each, by in ((rows, handle), (wide, bounded))
    )
    assert torch.equal(got, want)
    leaves = [mine.input, mine.probs]
    for a, b in zip(*(torch.autograd.grad(y, leaves, mine.grad) for y in (got, want)), strict=True):
        assert torch.equal(a, b)


def test_rows_behind_those_that_arrived_are_nobodys(on_ranks: OnRanks) -> None:
    on_ranks(_padded)


def _too_many(world: World, fault: str) -> str:
    mine = problem("one_expert", 8, torch.float32).part(world.rank, 8)
    bound = 300 + (world.rank == 2) if fault == "disagree" else 10
    try:
        moe_dispatch(mine.input, mine.plan(), world.groups[8], max_rows=bound)
    except ValueError as error:
        dist.barrier(world.groups[8])
        return str(error)
    return "no error"


def test_more_rows_than_the_bound_raise_on_every_rank(on_ranks: OnRanks) -> None:
    errors = on_ranks(_too_many, "few")
    assert "max_rows must be at least the" in errors[7] and errors[7].endswith("got 10")
    for error in errors[:7]:
        assert error.endswith("rank 7 of the group would receive more than max_rows rows"), error
    for error in on_ranks(_too_many, "disagree"):
        assert "agree on max_rows, got [300, 300, 301, 300" in error, error


def _bad_plan(world: World) -> str:
    """A graph runs; later a plan is wrong on one rank, and all raise out of the graph."""
    if not world.member(4):
        return ""
    mine = problem("uneven", 4, torch.float32).part(world.rank, 4)

    def layer(input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        rows, _, handle = moe_dispatch(input, plan, world.groups[4])
        return moe_combine(rows, handle)

    step, _ = _compiled(layer)
    plan = mine.plan()
    step(mine.input, plan)
    if world.rank == 1:
        plan = RoutingPlan(**{**vars(plan), "permutation": plan.permutation + 1})
    try:
        step(mine.input, plan)
    except ValueError as error:
        dist.barrier(world.groups[4])
        return str(error)
    return "no error"


def test_a_bad_plan_on_one_rank_raises_out_of_every_graph(on_ranks: OnRanks) -> None:
    for rank, error in enumerate(on_ranks(_bad_plan)[:4]):
        expected = "moe_dispatch: plan must have" if rank == 1 else "rank 1 of the group got a plan"
        assert expected in error, error


def _operators(world: World) -> None:
    mine = problem("random", 1, torch.float32).part(0, 1)
    if not world.member(1):
        return
    plan, ops = mine.plan(), torch.ops.fusedops
    order = plan.permutation, plan.positions, plan.offsets
    where = "moe_dispatch", world.groups[1].group_name
    slots = plan.permutation.numel()
    for bound in (None, slots):
        args = (mine.input, plan.probs, plan.expert_ids, *order, NUM_EXPERTS, None, True, bound)
        torch.library.opcheck(ops.moe_send.default, (*args, *where))
    rows, _, _, counts, _, anchor = ops.moe_send(*args, *where)
    results = rows.detach().clone().requires_grad_()
    back = (results, anchor.detach(), counts, rows.detach()[:0], slots, None, where[1])
    torch.library.opcheck(ops.moe_return.default, back)


def test_operators_are_what_they_say(on_ranks: OnRanks) -> None:
    on_ranks(_operators)


def _inductor(world: World) -> None:
    if world.member(2):
        block = _Block(world, 2)
        step, counter = _compiled(block.routed, "inductor")
        for _ in range(2):
            x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
            _same(block.routed, step, (x,), block.parameters)
        assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_gives_the_bits_of_eager(on_ranks: OnRanks) -> None:
    on_ranks(_inductor)
