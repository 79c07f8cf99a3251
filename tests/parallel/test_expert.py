"""Experts sharded over ranks and nodes: bits of one process, gradients, collectives, bad input."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expert_layer import (
    CASES,
    NUM_EXPERTS,
    Problem,
    assert_cases,
    experts,
    gradients,
    group_of,
    layer,
    on_one_process,
    part_of,
    problem,
)
from run_ranks import on_threads
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from fusedops import RoutingPlan, moe_mlp
from fusedops._core import dtypes
from fusedops.ops import moe_pack
from fusedops.ops._moe_payload import dequantize, quantize
from fusedops.parallel import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.comm import collectives
from fusedops.parallel.expert import all_to_all
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnProcesses = Callable[..., list[Any]]
Shape = tuple[int, ...]
FLOAT, HALF = torch.float32, torch.bfloat16
each_dtype = pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["float32", "bfloat16"])


@pytest.mark.ci(every=3)
@each_dtype
@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (8,), (1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
def test_sharded_experts_give_the_bits_of_one_process(shape: Shape, dtype: torch.dtype) -> None:
    threads.run(assert_cases, math.prod(shape), shape, dtype, {})


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_chunks_give_the_same_bits(chunks: int) -> None:
    threads.run(assert_cases, 4, (4,), HALF, {"chunks": chunks})


@each_dtype
def test_sums_made_in_the_nodes_are_within_the_budget(dtype: torch.dtype) -> None:
    threads.run(assert_cases, 8, (2, 4), dtype, {"chunks": 2, "reduce": "node"})


@pytest.mark.parametrize(("shape", "dtype", "chunks"), [((8,), FLOAT, 2), ((2, 4), HALF, 3)])
def test_processes_give_the_bits_of_one(
    on_processes: OnProcesses, shape: Shape, dtype: torch.dtype, chunks: int
) -> None:
    on_processes(assert_cases, 8, shape, dtype, {"chunks": chunks})


@pytest.mark.parametrize("shape", [(2,), (2, 4)], ids=str)
def test_at_most_two_collectives_per_direction_and_dimension(shape: Shape) -> None:
    threads.run(_assert_collectives, math.prod(shape), shape)


def _assert_collectives(rank: int, shape: Shape) -> None:
    group, dims, mine = group_of(shape), len(shape), part_of("uneven", rank, math.prod(shape))
    with collectives.recorded() as dispatch:  # counts and payload, and rows
        rows, plan, handle = moe_dispatch(mine.input, mine.plan(), group)
    results = experts(rows, plan, mine.w1, mine.w2)
    with collectives.recorded() as combine:
        output = moe_combine(results, handle, weighted=True)
    with collectives.recorded() as backward:  # only what carries gradients
        gradients(output, mine)
    counts = [len(log.calls) for log in (dispatch, combine, backward)]
    assert counts == [2 * dims, dims, 2 * dims]


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
@on_threads(8)
def test_dropped_slots_are_counted(rank: int, shape: Shape) -> None:
    whole = problem("capacity_one", 8, FLOAT)
    mine = whole.part(rank, 8)
    handle = moe_dispatch(mine.input, mine.plan(), group_of(shape))[2]
    assert whole.kept is not None
    dropped = [int((~part).sum()) for part in whole.kept.split(whole.counts)]
    assert (handle.num_dropped, handle.num_dropped_in_group) == (dropped[rank], sum(dropped))
    assert sum(dropped) == whole.ids.numel() - NUM_EXPERTS


@on_threads(8)
def test_float8_rounds_rows_once_and_keeps_gradients(rank: int) -> None:
    for dtype in (HALF, FLOAT):
        mine = part_of("uneven", rank, 8, dtype)
        exchanged = []
        for shape, payload in (((8,), "float8"), ((8,), None), ((2, 4), "float8")):
            group = group_of(shape)
            rows, _, handle = moe_dispatch(mine.input, mine.plan(), group, payload=payload)
            output = moe_combine(rows, handle, weighted=True)
            grads = torch.autograd.grad(output, [mine.input, mine.probs], mine.grad)
            exchanged.append((rows, handle.row_bytes, grads, output))
        (narrow, few, grads, output), (wide, many, exact, _), over_nodes = exchanged
        assert torch.equal(narrow, dequantize(*quantize(wide), dtype))
        assert few < many
        # Rounding counts as the identity: the gradient of the tokens is the exact one.
        assert torch.equal(grads[0], exact[0])
        assert torch.equal(output, over_nodes[-1])


@on_threads(8)
def test_rows_arrive_in_the_order_of_one_process(rank: int) -> None:
    """Sorted by the local plan, the rows stand as those of one process with all tokens."""
    whole = problem("uneven", 8, FLOAT)
    mine = whole.part(rank, 8)
    rows, plan, handle = moe_dispatch(mine.input, mine.plan(), dist.group.WORLD)
    everything = whole.plan()
    begin = 0 if rank == 0 else int(everything.offsets[rank - 1])
    end = int(everything.offsets[rank])
    slots = everything.permutation[begin:end].long()
    assert plan.num_experts == 1 and rows.shape[0] == end - begin == sum(handle.rows_received)
    assert torch.equal(rows[plan.permutation.long()], whole.input[slots // 3])
    assert torch.equal(plan.probs.flatten(), whole.probs.flatten()[slots])


@on_threads(8)
def test_a_mesh_of_one_dim_serves_as_group(rank: int) -> None:
    whole = problem("uneven", 8, FLOAT)
    mine, first = whole.part(rank, 8), sum(whole.counts[:rank])
    mesh = dist.device_mesh.init_device_mesh("cpu", (8,), mesh_dim_names=("expert",))
    expected = on_one_process(whole)[first : first + len(mine.input)]
    assert torch.equal(layer(mine, mesh), expected)


@on_threads(8)
def test_experts_that_ignore_their_rows_do_not_hang_the_backward(rank: int) -> None:
    """Experts without parameters that ignore their rows, on some ranks: the graph still holds."""
    mine = part_of("uneven", rank, 8)

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows.new_ones(rows.shape) if rank % 2 else rows * 2

    for chunks in (1, 3):
        options: dict[str, Any] = {"weighted": True, "chunks": chunks}
        output = expert_parallel(mine.input, mine.plan(), here, dist.group.WORLD, **options)
        grads = torch.autograd.grad(output.sum(), [mine.input, mine.probs])
        weight = torch.where(mine.ids % 2 == 0, 2.0, 0.0) * mine.probs
        expected = weight.sum(1, keepdim=True).expand_as(mine.input)
        torch.testing.assert_close(grads[0], expected)


@on_threads(8)
def test_checkpoints_and_second_backwards_give_the_same_gradients(rank: int) -> None:
    mine = part_of("uneven", rank, 8)
    output = layer(mine, dist.group.WORLD)
    plain = torch.autograd.grad(output, mine.leaves, mine.grad, retain_graph=True)
    again = checkpoint(layer, mine, dist.group.WORLD, use_reentrant=False)
    for result in (output, again):
        for got, want in zip(gradients(result, mine), plain, strict=True):
            assert torch.equal(got, want)


@on_threads(8)
def test_checkpoints_keep_the_gradients_of_chunks(rank: int) -> None:
    mine = part_of("uneven", rank, 8, HALF)
    weights = [mine.w1, mine.w2]

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return moe_mlp(rows, plan, mine.w1.mT, mine.w2.mT, gated=False)

    def again(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return checkpoint(here, rows, plan, use_reentrant=False)

    def layer(input: torch.Tensor, experts: Any = here) -> torch.Tensor:
        return expert_parallel(input, mine.plan(), experts, dist.group.WORLD, chunks=3)

    plain = torch.autograd.grad(layer(mine.input), weights, mine.grad)
    inside = torch.autograd.grad(layer(mine.input, again), weights, mine.grad)
    around = checkpoint(layer, mine.input, use_reentrant=False)
    outside = torch.autograd.grad(around, weights, mine.grad)
    checkpoint(layer, mine.input, use_reentrant=True).backward(mine.grad)
    for got in (inside, outside, [weight.grad for weight in weights]):
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@each_dtype
@pytest.mark.parametrize("size", [1, 4, 8])
@on_threads("size")
def test_moe_mlp_gives_the_bits_of_one_process(rank: int, size: int, dtype: torch.dtype) -> None:
    """The whole layer with moe_mlp, which multiplies by the probabilities where it computes."""
    for name in CASES:
        whole = problem(name, size, dtype)
        w1 = torch.cat([whole.w1, whole.w1.flip(0)], 1).detach().mT  # gate and up
        tokens, shard = whole.cuts(rank, size)
        expected = moe_mlp(whole.input, whole.plan(), w1, whole.w2.mT)
        mine = whole.part(rank, size)

        def here(
            rows: torch.Tensor, plan: RoutingPlan, first: Any = w1[shard], second: Any = mine.w2.mT
        ) -> torch.Tensor:
            return moe_mlp(rows, plan, first, second)

        output = expert_parallel(mine.input, mine.plan(), here, dist.group.WORLD, chunks=2)
        assert torch.equal(output, expected[tokens]), f"{name} on {size}, {dtype}: other bits"
        alone = torch.autograd.grad(expected, [whole.input, whole.probs], whole.grad)
        grads = torch.autograd.grad(output, [mine.input, mine.probs], mine.grad)
        for i, (got, want) in enumerate(zip(grads, alone, strict=True)):
            # Rows and slots are summed in the same order: these gradients have the same bits too.
            assert torch.equal(got, want[tokens]), f"{name} on {size}, {dtype}: gradient {i}"


def _summed_gradients(rank: int, shape: Shape, dtype: torch.dtype) -> None:
    """Weights' gradients, chunk by chunk, against those of one chunk and against float64."""
    size, group = math.prod(shape), group_of(shape)
    whole = problem("random", size, dtype)
    _, shard = whole.cuts(rank, size)

    def leaves(p: Problem) -> list[torch.Tensor]:
        both = torch.cat([p.w1, p.w1.flip(0)], 1), p.w2
        biases = p.w1.flip(0).repeat(1, 2, 1)[..., 0], p.w2[..., 0]
        return [each.detach().clone().requires_grad_() for each in (*both, *biases)]

    def run(p: Problem, weights: list[torch.Tensor], layer: Any) -> list[torch.Tensor]:
        first, second, *biases = weights

        def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
            return moe_mlp(rows, plan, first.mT, second.mT, *biases)

        return list(torch.autograd.grad(layer(here), weights, p.grad))

    exact = whole.to(torch.float64)
    doubles = run(exact, leaves(exact), lambda here: here(exact.input, exact.plan()))
    truth = [each[shard] for each in doubles]
    mine = whole.part(rank, size)
    weights = [leaf[shard].detach().clone().requires_grad_() for leaf in leaves(whole)]

    def in_chunks(chunks: int) -> list[torch.Tensor]:
        given = mine.input, mine.plan()
        return run(mine, weights, lambda here: expert_parallel(*given, here, group, chunks=chunks))

    alone = in_chunks(1)
    for chunks in (2, 3, 8):
        for i, grads in enumerate(zip(in_chunks(chunks), alone, truth, strict=True)):
            got, want, right = (grad.double() for grad in grads)
            label = f"{chunks} chunks over {shape}, {dtype}, gradient {i}"
            # Another order of a float32 sum, rounded to one or the other side.
            close = dtypes.error_budget(alone[i], want, dtype, depth=len(whole.input))
            assert ((got - want).abs() <= close).all(), f"{label}: rounded more than once"
            error, before = ((each - right).square().mean() for each in (got, want))
            assert error <= 1.05 * before, f"{label}: {error} with chunks, {before} without"


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_chunks_do_not_change_the_weights_gradients(shape: Shape, dtype: torch.dtype) -> None:
    """Of chunks or nodes they are summed once and rounded once."""
    threads.run(_summed_gradients, math.prod(shape), shape, dtype)


class _Experts(torch.autograd.Function):
    """Twice the rows; forward and backward are computations of the log."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        with collectives.computing("experts"):
            return 2 * rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with collectives.computing("experts backward"):
            return 2 * grad


@on_threads(2)
def test_exchanges_overlap_with_the_experts(rank: int) -> None:
    mine = part_of("random", rank, 2)
    with collectives.recorded() as log:
        output = expert_parallel(
            mine.input,
            mine.plan(),
            lambda rows, _: _Experts.apply(rows),
            dist.group.WORLD,
            chunks=2,
        )
        output.sum().backward()
    # Of two chunks: what the second waits for, and what is made of the first.
    assert Counter(log.overlapped()) == {
        ("tokens to experts", "experts"): 1,
        ("experts' results", "experts"): 1,
        ("gradients of results", "experts backward"): 1,
        ("gradients of tokens", "experts backward"): 1,
    }


def _pack_in_bounds(
    input: Any, probs: Any, ids: Any, *, index: Any, num_rows: Any, **more: Any
) -> Any:
    """Pack; assert before that nothing is read where a kernel on a GPU must not read."""
    assert 0 <= int(num_rows) <= index.numel() == probs.numel() == ids.numel()
    assert int(index.min()) >= 0 and int(index.max()) < index.numel()
    # Without an expert on any node a slot has id -1.
    assert int(ids.min()) >= (-1 if more["span"] else 0) and int(ids.max()) <= NUM_EXPERTS
    return moe_pack(input, probs, ids, index=index, num_rows=num_rows, **more)


def _with(plan: RoutingPlan, **fields: torch.Tensor) -> RoutingPlan:
    return RoutingPlan(**{**vars(plan), **fields})


# What one rank passes instead of its tokens, its plan and the options of all.
FAULTS: dict[str, Callable[[Problem, RoutingPlan], dict[str, Any]]] = {
    "mismatch": lambda mine, plan: {"input": mine.input[:-1]},
    "type": lambda mine, plan: {"input": [1.0]},
    "ids": lambda mine, plan: {"plan": _with(plan, expert_ids=plan.expert_ids + 7)},
    "negative ids": lambda mine, plan: {"plan": _with(plan, expert_ids=plan.expert_ids - 1)},
    "offsets": lambda mine, plan: {"plan": _with(plan, offsets=plan.offsets.flip(0))},
    "permutation": lambda mine, plan: {"plan": _with(plan, permutation=plan.permutation + 1)},
    "experts": lambda mine, plan: {"plan": RoutingPlan.from_choices(mine.ids, mine.probs, 16)},
    "hidden": lambda mine, plan: {"input": mine.input[:, :20]},
    "dtype": lambda mine, plan: {"input": mine.input.double()},
    "grad": lambda mine, plan: {
        "input": mine.input.detach(),
        "plan": plan.with_probs(plan.probs.detach()),
    },
    "chunks": lambda mine, plan: {"chunks": 9},
    "reduce": lambda mine, plan: {"reduce": "node"},
    "validate": lambda mine, plan: {"validate": True},
}


# What the experts of one rank return instead of their results.
RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "result": lambda rows: rows[1:],
    "result dtype": lambda rows: rows.double(),
    "result type": lambda rows: None,
}


def _one_is_wrong(rank: int, fault: str, shape: Shape, wrong: int, chunks: int) -> str:
    """Call with something wrong on one rank (or with ranks that disagree) and return the error."""
    mine, group = part_of("uneven", rank, 8), group_of(shape)
    given: dict[str, Any] = {"input": mine.input, "plan": mine.plan(), "chunks": chunks}
    given |= {"reduce": "source", "validate": fault in RESULTS}
    if rank == wrong and fault in FAULTS:
        given |= FAULTS[fault](mine, given["plan"])
    if fault == "divides":
        given["plan"] = RoutingPlan.from_choices(mine.ids, mine.probs, 12)

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return RESULTS[fault](rows) if rank == wrong and fault in RESULTS else rows

    try:
        expert_parallel(given.pop("input"), given.pop("plan"), here, group, **given)
    except (TypeError, ValueError) as error:
        # The group still works: nobody is left in a collective.
        dist.barrier()
        assert_cases(rank, shape, FLOAT, {}, ("uneven",))
        return f"{type(error).__name__}: {error}"
    return "no error"


def _errors(fault: str, shape: Shape = (8,), wrong: int = 2, chunks: int = 1) -> list[str]:
    with mock.patch.object(all_to_all, "moe_pack", _pack_in_bounds):
        return threads.run(_one_is_wrong, 8, fault, shape, wrong, chunks)


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("mismatch", "ValueError: expert_parallel: plan must be of the", "do not fit"),
        ("type", "TypeError: expert_parallel: input must be a torch.Tensor", "wrong type"),
        ("ids", "ValueError: expert_parallel: plan must have expert_ids in", "out of range"),
        ("offsets", "ValueError: expert_parallel: plan must have", "out of range"),
        ("permutation", "ValueError: expert_parallel: plan must have", "out of range"),
        ("chunks", "ValueError: expert_parallel: chunks must be from 1 to 8, got 9", "do not fit"),
        ("reduce", "ValueError: expert_parallel: reduce must be 'source' where", "do not fit"),
        ("result", "ValueError: moe_combine: output must be of shape", "do not fit"),
        ("result dtype", "TypeError: moe_combine: output must have the dtype", "wrong type"),
        ("result type", "TypeError: moe_combine: output must be a torch.Tensor", "wrong type"),
    ],
)
def test_bad_input_on_one_rank_raises_on_all(fault: str, own: str, others: str) -> None:
    for rank, error in enumerate(_errors(fault)):
        if rank == 2:
            assert error.startswith(own), error
        else:
            assert error.startswith("ValueError") and "rank 2" in error and others in error, error


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("experts", "num_experts, got [8, 8, 16, 8"),
        ("hidden", "hidden_size, got [24, 24, 20, 24"),
        ("dtype", "dtype, got [torch.float32, torch.float32, torch.float64"),
        ("grad", "requires_grad, got [1, 1, 0, 1"),
        ("validate", "validate, got [0, 0, 1, 0"),
        ("divides", "size that divides the plan's 12 experts, got 8"),
    ],
)
def test_ranks_that_disagree_all_raise(fault: str, names: str) -> None:
    for error in _errors(fault):
        assert error.startswith("ValueError") and names in error, error


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("fault", ["mismatch", "negative ids", "hidden", "reduce", "result"])
def test_bad_input_on_one_rank_raises_on_all_ranks_of_all_nodes(fault: str, chunks: int) -> None:
    errors = _errors(fault, (2, 4), 6, chunks)
    for error in errors:
        assert error.startswith("ValueError"), error
    if fault == "result":
        assert "output must be of shape" in errors[6]
        assert all("a rank of node 1 got" in error for error in errors[:4]), errors
        assert all("rank 2 of this node got" in errors[rank] for rank in (4, 5, 7)), errors


@on_threads(1)
def test_a_second_derivative_is_refused(rank: int) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    plan = RoutingPlan.from_choices(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2)
    for chunks in (1, 2):
        output = expert_parallel(x, plan, lambda rows, _: rows**2, dist.group.WORLD, chunks=chunks)
        with pytest.raises(RuntimeError, match="derivative|differentiate twice"):
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            slope.sum().backward()


def test_a_group_of_another_kind_is_refused() -> None:
    plan = RoutingPlan.from_choices(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2)
    with pytest.raises(TypeError, match="moe_dispatch: group must be a ProcessGroup"):
        moe_dispatch(torch.ones(2, 4), plan, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="moe_combine: handle must be of moe_dispatch"):
        moe_combine(torch.ones(2, 4), plan)  # type: ignore[arg-type]
