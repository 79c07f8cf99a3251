"""Dispatch, experts and combine in one graph: the bits of eager, forwards and backwards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_layer import CASES, HIDDEN, INNER, NUM_EXPERTS, TOP_K, group_of, part_of
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from fusedops import RoutingPlan, layer_norm
from fusedops.nn import MoE
from fusedops.parallel import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.comm import collectives

pytestmark = pytest.mark.distributed
OnProcesses = Callable[..., list[Any]]

# Cases with the same number of tokens on every rank, in each a different number of rows.
SAME_TOKENS = ("random", "one_expert", "ties", "same_expert_twice", "sentinels", "all_dropped")
TOKENS = 6
# A group of ranks, or a mesh of nodes and the ranks of each.
Shape = tuple[int, ...]
# Every rank compiles for itself: two are enough where nothing depends on their number.
over_both = pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)


class _Block:
    """Norm, route, dispatch, experts, combine, residual."""

    def __init__(self, rank: int, shape: Shape, **options: Any) -> None:
        torch.manual_seed(rank)
        self.group, self.options = group_of(shape), options
        self.router = MoE(HIDDEN, INNER, NUM_EXPERTS, TOP_K).gate
        self.experts = MoE(HIDDEN, INNER, NUM_EXPERTS // math.prod(shape), 1).experts
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
        arrived, local_plan, handle = moe_dispatch(rows, plan, self.group, **self.options)
        return moe_combine(self.experts(arrived, local_plan), handle)


def _assert_same_bits(
    eager: Any, compiled: Any, args: tuple[torch.Tensor, ...], leaves: Any
) -> None:
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


def _adversarial(rank: int, shape: Shape, options: dict[str, Any]) -> int:
    block = _Block(rank, shape, **options)
    step, counter = _compiled(block.given)
    for name in SAME_TOKENS:
        ids, _ = CASES[name].choose(TOKENS, NUM_EXPERTS)
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        _assert_same_bits(block.given, step, (x, ids.long()), block.parameters)
    return counter.frame_count


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2,), {}),
        ((2, 2), {"reduce": "node"}),
        *(pytest.param(shape, {}, marks=pytest.mark.slow) for shape in ((1,), (4,), (2, 2))),
    ],
    ids=str,
)
def test_one_graph_for_every_routing_gives_the_bits_of_eager(
    on_processes: OnProcesses, shape: Shape, options: dict[str, Any]
) -> None:
    graphs = on_processes(_adversarial, math.prod(shape), shape, options)
    assert graphs == [1] * len(graphs)


def _routed(rank: int, shape: Shape, tokens: list[list[int]], backend: str = "aot_eager") -> int:
    """Compare batches of so many tokens of each rank; return how many graphs were made."""
    block = _Block(rank, shape)
    step, counter = _compiled(block.routed, backend)
    for counts in tokens:
        x = torch.randn(counts[rank], HIDDEN, requires_grad=True)
        _assert_same_bits(block.routed, step, (x,), block.parameters)
    return counter.frame_count


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "tokens", "graphs"),
    [
        # Other numbers of tokens, one graph for all but the first.
        ((2, 1), [[6, 6], [7, 7], [4, 4]], 2),
        # Ranks without tokens compile too.
        ((2,), [[0, 5]] * 2, 1),
        ((2, 1), [[0, 0]] * 2, 1),
    ],
    ids=str,
)
def test_any_number_of_tokens_is_compiled_once(
    on_processes: OnProcesses, shape: Shape, tokens: list[list[int]], graphs: int
) -> None:
    assert on_processes(_routed, 2, shape, tokens) == [graphs] * 2


def _over_nodes(rank: int) -> tuple[list[int], int]:
    """Return the collectives of a forward and a backward pass, compiled and not, and the graphs."""
    block, counts = _Block(rank, (2, 2)), []
    step, counter = _compiled(block.routed)
    x = torch.randn((5, 0, 1, 7)[rank], HIDDEN, requires_grad=True)
    _assert_same_bits(block.routed, step, (x,), block.parameters)
    _assert_same_bits(
        block.routed, step if rank in (1, 2) else block.routed, (x,), block.parameters
    )
    for function in (step, block.routed):
        with collectives.recorded() as log:
            output = function(x)
        counts.append(log.counts()["all_to_all"])
        with collectives.recorded() as log:
            output.sum().backward()
        counts.append(log.counts()["all_to_all"])
    return counts, counter.frame_count


def test_a_graph_over_nodes_has_the_collectives_of_eager(on_processes: OnProcesses) -> None:
    """Of a dimension two to dispatch, one to combine.

    A compiled rank and one that is not understand each other.
    """
    assert on_processes(_over_nodes, 4) == [(2 * [6, 4], 1)] * 4


def _other_experts(rank: int, shape: Shape, options: dict[str, Any]) -> None:
    """Rows that some ranks' experts ignore, and a call in expert_parallel's form."""
    group, mine = group_of(shape), part_of("uneven", rank, math.prod(shape), torch.bfloat16)

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows.new_ones(rows.shape) if rank % 2 else rows * 2

    def layer(input: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        plan = RoutingPlan.from_choices(mine.ids, probs, NUM_EXPERTS)
        # In a graph the tokens are not cut; the ranks agree all the same.
        return expert_parallel(input, plan, here, group, chunks=3, weighted=True, **options)

    step, _ = _compiled(layer)
    _assert_same_bits(layer, step, (mine.input, mine.probs), [mine.probs])


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("options", [{}, {"payload": "float8"}], ids=str)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=str)
def test_ranks_whose_experts_ignore_their_rows_take_part(
    on_processes: OnProcesses, shape: Shape, options: dict[str, Any]
) -> None:
    """Of float8 rows the gradient of the probabilities runs through the node that weighs."""
    if shape == (2, 2):
        options = {**options, "reduce": "node"}
    on_processes(_other_experts, math.prod(shape), shape, options)


def _counted(rank: int, shape: Shape) -> None:
    """The handle leaves the graph; combine may stand in another one, or in none."""
    group, mine = group_of(shape), part_of("sentinels", rank, 2)
    plan = mine.plan()
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


@over_both
def test_the_handle_of_a_graph_has_the_counts_as_tensors(
    on_processes: OnProcesses, shape: Shape
) -> None:
    on_processes(_counted, 2, shape)


FAULTS = {
    "ids": "moe_dispatch: plan must have",
    "plan": "moe_dispatch: plan must have",
    "result": "moe_combine: output must be",
}


def _wrong_in_a_graph(rank: int, shape: Shape, faults: list[str]) -> list[str]:
    """A graph runs; later something is wrong on the last rank, and all raise out of the graph."""
    group, ranks = group_of(shape), math.prod(shape)
    mine = part_of("uneven", rank, ranks)

    def layer(input: torch.Tensor, plan: RoutingPlan, more: torch.Tensor) -> torch.Tensor:
        rows, _, handle = moe_dispatch(input, plan, group, validate=True)
        return moe_combine(torch.cat((more, rows))[2:], handle)

    step, counter = _compiled(layer)
    right, told = mine.plan(), []
    more = mine.input.new_zeros(2, HIDDEN)
    torch._dynamo.mark_dynamic(more, 0)
    for fault in faults:
        step(mine.input, right, more)  # after a fault as well
        plan, longer = right, more
        if rank < ranks - 1:
            pass
        elif fault == "plan":
            plan = RoutingPlan(**{**vars(plan), "permutation": plan.permutation + 1})
        elif fault == "ids":
            plan = RoutingPlan(**{**vars(plan), "expert_ids": plan.expert_ids - 1})
        elif fault == "result":
            longer = mine.input.new_zeros(3, HIDDEN)
        try:
            step(mine.input, plan, longer)
            told.append("no error")
        except ValueError as error:
            told.append(str(error))
        dist.barrier()
    assert counter.frame_count == 1
    return told


@pytest.mark.parametrize(
    ("shape", "faults"),
    [((1,), ["result"]), ((2,), ["ids", "plan"]), ((2, 2), ["ids", "plan"])],
    ids=str,
)
def test_what_is_wrong_on_one_rank_raises_out_of_every_graph(
    on_processes: OnProcesses, shape: Shape, faults: list[str]
) -> None:
    ranks = math.prod(shape)
    for rank, told in enumerate(on_processes(_wrong_in_a_graph, ranks, shape, faults)):
        for fault, error in zip(faults, told, strict=True):
            reason = FAULTS[fault]
            wanted = reason if rank == ranks - 1 else f"{reason.split()[0]} (a )?rank"
            assert re.match(wanted, error) is not None, error


def _refused_while_traced(rank: int) -> None:
    mine, group = part_of("uneven", 0, 1), group_of((1,))
    for misfit in (torch.Tensor.double, lambda rows: rows[:, 1:], lambda rows: rows.flatten()):

        def layer(input: torch.Tensor, plan: RoutingPlan, misfit: Any = misfit) -> torch.Tensor:
            rows, _, handle = moe_dispatch(input, plan, group, validate=True)
            return moe_combine(misfit(rows), handle)

        with pytest.raises(torch._dynamo.exc.Unsupported, match='"moe_combine", "output"'):
            _compiled(layer)[0](mine.input, mine.plan())


def test_no_graph_is_made_of_results_that_do_not_fit(on_processes: OnProcesses) -> None:
    on_processes(_refused_while_traced, 1)


@pytest.mark.slow
@over_both
def test_inductor_gives_the_bits_of_eager(on_processes: OnProcesses, shape: Shape) -> None:
    assert on_processes(_routed, 2, shape, [[TOKENS] * 2] * 2, "inductor") == [1] * 2
