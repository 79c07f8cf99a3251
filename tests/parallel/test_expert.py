"""Experts sharded over 1, 2, 4 and 8 processes: same bits, gradients, collectives, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expert_layer import (
    CASES,
    NUM_EXPERTS,
    assert_case,
    expert_grads,
    experts,
    gradients,
    layer,
    on_one_process,
    problem,
)
from process_pool import SIZES, World
from torch import distributed as dist

from fusedops import RoutingPlan, moe_mlp
from fusedops.nn import MoE
from fusedops.ops import moe_pack
from fusedops.parallel import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.async_exchange import send_rows
from fusedops.parallel.comm import collectives
from fusedops.parallel.expert import all_to_all
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]


def _same_bits(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    place = rank, dist.get_world_size()
    for name in CASES:
        assert_case(name, dist.group.WORLD, place, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("size", SIZES)
def test_sharded_experts_give_the_bits_of_one_process(size: int, dtype: torch.dtype) -> None:
    threads.run(_same_bits, size, dtype, {})


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_chunks_give_the_same_bits(chunks: int) -> None:
    threads.run(_same_bits, 4, torch.bfloat16, {"chunks": chunks})


def _processes_give_the_bits_of_one(world: World) -> None:
    for name in CASES:
        assert_case(name, world.groups[8], (world.rank, 8), torch.float32, chunks=2)


def _counted(world: World, shape: tuple[int, ...]) -> dict[str, int]:
    group, size, counts = world.group(*shape), math.prod(shape), {}
    if not world.member(size):
        return counts
    mine = problem("uneven", size, torch.float32).part(world.rank, size)

    def count(name: str, function: Callable[[], Any]) -> Any:
        with collectives.recorded() as log:
            result = function()
        counts[name] = len(log.calls)
        return result

    rows, plan, handle = count("dispatch", lambda: moe_dispatch(mine.input, mine.plan(), group))
    results = experts(rows, plan, mine.w1, mine.w2)
    output = count("combine", lambda: moe_combine(results, handle, weighted=True))
    count("backward", lambda: gradients(output, mine))
    return counts


@pytest.mark.parametrize("shape", [(2,), (2, 4)], ids=str)
def test_at_most_two_collectives_per_direction_and_dimension(
    on_ranks: OnRanks, shape: tuple[int, ...]
) -> None:
    # Forwards counts and payload, and rows; backwards only what carries gradients.
    dims, expected = len(shape), {"dispatch": 2, "combine": 1, "backward": 2}
    for counts in on_ranks(_counted, shape)[: math.prod(shape)]:
        assert counts == {name: dims * count for name, count in expected.items()}


def _a_mesh_serves_as_group(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    whole = problem("uneven", 8, torch.float32)
    mine = whole.part(world.rank, 8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("expert",))
    first = sum(whole.counts[: world.rank])
    expected = on_one_process(whole)[first : first + len(mine.input)]
    assert torch.equal(layer(mine, mesh), expected)


def _rows_arrive_in_the_order_of_one_process(world: World) -> None:
    """Sorted by the local plan, the rows stand as those of one process with all tokens."""
    whole = problem("uneven", 8, torch.float32)
    mine = whole.part(world.rank, 8)
    rows, plan, handle = moe_dispatch(mine.input, mine.plan(), world.groups[8])
    everything = whole.plan()
    begin = 0 if world.rank == 0 else int(everything.offsets[world.rank - 1])
    end = int(everything.offsets[world.rank])
    slots = everything.permutation[begin:end].long()
    assert plan.num_experts == 1 and rows.shape[0] == end - begin == sum(handle.rows_received)
    assert torch.equal(rows[plan.permutation.long()], whole.input[slots // 3])
    assert torch.equal(plan.probs.flatten(), whole.probs.flatten()[slots])


def _drops(world: World, shape: tuple[int, ...]) -> tuple[int, int]:
    mine = problem("capacity_one", 8, torch.float32).part(world.rank, 8)
    handle = moe_dispatch(mine.input, mine.plan(), world.group(*shape))[2]
    return handle.num_dropped, handle.num_dropped_in_group


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_dropped_slots_are_counted(on_ranks: OnRanks, shape: tuple[int, ...]) -> None:
    counts = on_ranks(_drops, shape)
    whole = problem("capacity_one", 8, torch.float32)
    assert whole.kept is not None
    dropped = [int((~part).sum()) for part in whole.kept.split(whole.counts)]
    assert counts == [(mine, sum(dropped)) for mine in dropped]
    assert sum(dropped) == whole.ids.numel() - NUM_EXPERTS


def _float8_rounds_rows_and_keeps_gradients(world: World) -> None:
    from fusedops.ops._moe_payload import dequantize, quantize

    for dtype in (torch.bfloat16, torch.float32):
        whole = problem("uneven", 8, dtype)
        mine = whole.part(world.rank, 8)
        exchanged = []
        for payload in ("float8", None):
            rows, _, handle = moe_dispatch(
                mine.input, mine.plan(), world.groups[8], payload=payload
            )
            output = moe_combine(rows, handle, weighted=True)
            grads = torch.autograd.grad(output, [mine.input, mine.probs], mine.grad)
            exchanged.append((rows, handle.row_bytes, grads))
        (narrow, few, grads), (wide, many, exact) = exchanged
        assert torch.equal(narrow, dequantize(*quantize(wide), dtype))
        assert few < many
        # Rounding counts as the identity: the gradient of the tokens is the exact one.
        assert torch.equal(grads[0], exact[0])


def _pack_in_bounds(
    input: Any, probs: Any, ids: Any, *, index: Any, num_rows: Any, **more: Any
) -> Any:
    """Pack; assert before that nothing is read where a kernel on a GPU must not read."""
    assert 0 <= int(num_rows) <= index.numel() == probs.numel() == ids.numel()
    assert int(index.min()) >= 0 and int(index.max()) < index.numel()
    # Without an expert on any node a slot has id -1.
    assert int(ids.min()) >= (-1 if more["span"] else 0) and int(ids.max()) <= NUM_EXPERTS
    return moe_pack(input, probs, ids, index=index, num_rows=num_rows, **more)


def _one_is_wrong(
    world: World, fault: str, shape: tuple[int, ...] = (8,), wrong: int = 2, chunks: int = 1
) -> str:
    """Call with something wrong on one rank (or with ranks that disagree) and return the error."""
    group = world.group(*shape)
    mine = problem("uneven", 8, torch.float32).part(world.rank, 8)
    input, plan, reduce, validate = mine.input, mine.plan(), "source", fault == "result"
    if world.rank == wrong:
        if fault == "mismatch":
            input = input[:-1]
        elif fault == "type":
            input = [1.0]
        elif fault == "ids":
            plan = _with(plan, expert_ids=plan.expert_ids + 7)
        elif fault == "negative ids":
            plan = _with(plan, expert_ids=plan.expert_ids - 1)
        elif fault == "offsets":
            plan = _with(plan, offsets=plan.offsets.flip(0))
        elif fault == "permutation":
            plan = _with(plan, permutation=plan.permutation + 1)
        elif fault == "experts":
            plan = RoutingPlan.from_choices(mine.ids, mine.probs, 16)
        elif fault == "hidden":
            input = input[:, :20]
        elif fault == "dtype":
            input = input.double()
        elif fault == "grad":
            input, plan = input.detach(), plan.with_probs(plan.probs.detach())
        elif fault == "chunks":
            chunks = 9
        elif fault == "reduce":
            reduce = "node"
        elif fault == "validate":
            validate = True
    if fault == "divides":
        plan = RoutingPlan.from_choices(mine.ids, mine.probs, 12)

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows[1:] if world.rank == wrong and fault == "result" else rows

    options: Any = {"chunks": chunks, "reduce": reduce, "validate": validate}
    try:
        with mock.patch.object(all_to_all, "moe_pack", _pack_in_bounds):
            expert_parallel(input, plan, here, group, **options)
    except (TypeError, ValueError) as error:
        # The group still works: nobody is left in a collective.
        dist.barrier(world.groups[8])
        assert_case("uneven", group, (world.rank, 8), torch.float32)
        return f"{type(error).__name__}: {error}"
    return "no error"


def _with(plan: RoutingPlan, **fields: torch.Tensor) -> RoutingPlan:
    return RoutingPlan(**{**vars(plan), **fields})


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
    ],
)
def test_bad_input_on_one_rank_raises_on_all(
    on_ranks: OnRanks, fault: str, own: str, others: str
) -> None:
    for rank, error in enumerate(on_ranks(_one_is_wrong, fault)):
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
def test_ranks_that_disagree_all_raise(on_ranks: OnRanks, fault: str, names: str) -> None:
    for error in on_ranks(_one_is_wrong, fault):
        assert error.startswith("ValueError") and names in error, error


def _bad_result(world: World, fault: str) -> str:
    mine = problem("uneven", 8, torch.float32).part(world.rank, 8)
    rows, _, handle = moe_dispatch(mine.input, mine.plan(), world.groups[8], validate=True)
    results: Any = rows
    if world.rank == 5:
        results = {"shape": rows[:-1], "dtype": rows.double(), "type": None}[fault]
    try:
        moe_combine(results, handle)
    except (TypeError, ValueError) as error:
        dist.barrier(world.groups[8])
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("fault", "own"),
    [
        ("shape", "ValueError: moe_combine: output must be of shape"),
        ("dtype", "TypeError: moe_combine: output must have the dtype of the rows"),
        ("type", "TypeError: moe_combine: output must be a torch.Tensor"),
    ],
)
def test_bad_results_on_one_rank_raise_on_all(on_ranks: OnRanks, fault: str, own: str) -> None:
    for rank, error in enumerate(on_ranks(_bad_result, fault)):
        if rank == 5:
            assert error.startswith(own), error
        else:
            assert error.startswith("ValueError: moe_combine: rank 5"), error


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        (torch.ones(3, 4), ValueError, "moe_combine: output must be of shape"),
        (torch.ones(2, 4).double(), TypeError, "output must have the dtype of the rows"),
        (None, TypeError, "moe_combine: output must be a torch.Tensor"),
    ],
    ids=["shape", "dtype", "type"],
)
def test_results_that_do_not_fit_the_rows_are_refused(
    output: Any, error: type[Exception], words: str
) -> None:
    threads.run(_refuses_results, 1, output, error, words)


def _refuses_results(rank: int, output: Any, error: type[Exception], words: str) -> None:
    plan = RoutingPlan.from_choices(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2)
    handle = moe_dispatch(torch.ones(2, 4), plan, dist.group.WORLD)[2]
    with pytest.raises(error, match=words):
        moe_combine(output, handle)


def _refuses_second_derivatives(rank: int) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    plan = RoutingPlan.from_choices(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2)
    for chunks in (1, 2):
        output = expert_parallel(x, plan, lambda rows, _: rows**2, dist.group.WORLD, chunks=chunks)
        with pytest.raises(RuntimeError, match="derivative|differentiate twice"):
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            slope.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    threads.run(_refuses_second_derivatives, 1)


def test_a_group_of_another_kind_is_refused() -> None:
    plan = RoutingPlan.from_choices(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2)
    with pytest.raises(TypeError, match="moe_dispatch: group must be a ProcessGroup"):
        moe_dispatch(torch.ones(2, 4), plan, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="moe_combine: handle must be of moe_dispatch"):
        moe_combine(torch.ones(2, 4), plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("fault", ["mismatch", "negative ids", "hidden", "reduce", "result"])
def test_bad_input_on_one_rank_raises_on_all_ranks_of_all_nodes(
    on_ranks: OnRanks, fault: str, chunks: int
) -> None:
    errors = on_ranks(_one_is_wrong, fault, (2, 4), 6, chunks)
    for error in errors:
        assert error.startswith("ValueError"), error
    if fault == "result":
        assert "output must be of shape" in errors[6]
        assert all("a rank of node 1 got" in error for error in errors[:4]), errors
        assert all("rank 2 of this node got" in errors[rank] for rank in (4, 5, 7)), errors


def _experts_that_ignore_their_rows_do_not_hang_the_backward(world: World) -> None:
    """Experts without parameters that ignore their rows, on some ranks: the graph still holds."""
    mine = problem("uneven", 8, torch.float32).part(world.rank, 8)

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows.new_ones(rows.shape) if world.rank % 2 else rows * 2

    for chunks in (1, 3):
        output = expert_parallel(
            mine.input, mine.plan(), here, world.groups[8], weighted=True, chunks=chunks
        )
        grads = torch.autograd.grad(output.sum(), [mine.input, mine.probs])
        weight = torch.where(mine.ids % 2 == 0, 2.0, 0.0) * mine.probs
        expected = weight.sum(1, keepdim=True).expand_as(mine.input)
        torch.testing.assert_close(grads[0], expected)


def _checkpointing_gives_the_same_gradients(world: World) -> None:
    from torch.utils.checkpoint import checkpoint

    mine = problem("uneven", 8, torch.float32).part(world.rank, 8)
    plain = gradients(layer(mine, world.groups[8]), mine)
    output = checkpoint(layer, mine, world.groups[8], use_reentrant=False)
    for got, want in zip(gradients(output, mine), plain, strict=True):
        assert torch.equal(got, want)


def _a_graph_can_be_differentiated_again(world: World) -> None:
    mine = problem("uneven", 8, torch.float32).part(world.rank, 8)
    output = layer(mine, world.groups[8])
    first = torch.autograd.grad(output, mine.leaves, mine.grad, retain_graph=True)
    for got, want in zip(gradients(output, mine), first, strict=True):
        assert torch.equal(got, want)


def _compile_does_not_break_around_it(world: World) -> None:
    if not world.member(2):
        return
    mine = problem("uneven", 2, torch.float32).part(world.rank, 2)

    def model(input: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        plan = RoutingPlan.from_choices(mine.ids, probs * 1.0, NUM_EXPERTS)
        rows, local_plan, handle = moe_dispatch(input + 0.0, plan, world.groups[2])
        results = experts(rows, local_plan, mine.w1, mine.w2)
        return moe_combine(results, handle, weighted=True) * 2.0

    eager = model(mine.input, mine.probs)
    compiled = torch.compile(model, backend="aot_eager")(mine.input, mine.probs)
    assert torch.equal(eager, compiled)
    for got, want in zip(gradients(compiled, mine), gradients(eager, mine), strict=True):
        assert torch.equal(got, want)


_EVENTS: list[str] = []


def _recorded(*args: Any, **kwargs: Any) -> collectives.Pending:
    """Write down when an exchange starts and when it is waited for."""
    name = f"exchange {sum(event.startswith('start') for event in _EVENTS)}"
    _EVENTS.append(f"start {name}")
    pending = send_rows(*args, **kwargs)

    def finish() -> torch.Tensor:
        _EVENTS.append(f"wait {name}")
        return pending.wait()

    return collectives.Pending(finish)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        _EVENTS.append("experts")
        return 2 * rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _EVENTS.append("experts backward")
        return 2 * grad


def _timeline(world: World) -> list[str]:
    mine = problem("random", 8, torch.float32).part(world.rank, 8)
    _EVENTS.clear()
    all_to_all.send_rows = _recorded
    try:
        output = expert_parallel(
            mine.input, mine.plan(), lambda rows, _: _Compute.apply(rows), world.groups[8], chunks=2
        )
        output.sum().backward()
    finally:
        all_to_all.send_rows = send_rows
    return list(_EVENTS)


def test_exchanges_overlap_with_the_experts(on_ranks: OnRanks) -> None:
    for events in on_ranks(_timeline):
        first, second = (i for i, event in enumerate(events) if event == "experts")
        # Exchange 1 (tokens of the second chunk) and 2 (results of the first) run meanwhile.
        assert events.index("start exchange 1") < first < events.index("wait exchange 1")
        assert events.index("start exchange 2") < second < events.index("wait exchange 2")
        first, second = (i for i, event in enumerate(events) if event == "experts backward")
        # 4 and 5 bring the gradients of the results, 6 and 7 those of the tokens.
        assert events.index("start exchange 5") < first < events.index("wait exchange 5")
        assert events.index("start exchange 6") < second < events.index("wait exchange 6")


def _fused_experts(world: World, size: int, dtype: torch.dtype) -> None:
    """The whole layer with moe_mlp, which multiplies by the probabilities where it computes."""
    if not world.member(size):
        return
    for name in CASES:
        whole = problem(name, size, dtype)
        w1 = torch.cat([whole.w1, whole.w1.flip(0)], 1).detach().mT  # gate and up
        per_rank = NUM_EXPERTS // size
        shard = slice(world.rank * per_rank, (world.rank + 1) * per_rank)
        expected = moe_mlp(whole.input, whole.plan(), w1, whole.w2.mT)
        mine = whole.part(world.rank, size)

        def here(
            rows: torch.Tensor, plan: RoutingPlan, first: Any = w1[shard], second: Any = mine.w2.mT
        ) -> torch.Tensor:
            return moe_mlp(rows, plan, first, second)

        output = expert_parallel(mine.input, mine.plan(), here, world.groups[size], chunks=2)
        begin = sum(whole.counts[: world.rank])
        tokens = slice(begin, begin + len(mine.input))
        assert torch.equal(output, expected[tokens]), f"{name} on {size}, {dtype}: other bits"
        alone = torch.autograd.grad(expected, [whole.input, whole.probs], whole.grad)
        grads = torch.autograd.grad(output, [mine.input, mine.probs], mine.grad)
        for i, (got, want) in enumerate(zip(grads, alone, strict=True)):
            # Rows and slots are summed in the same order: these gradients have the same bits too.
            assert torch.equal(got, want[tokens]), f"{name} on {size}, {dtype}: gradient {i}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_moe_mlp_gives_the_bits_of_one_process(
    on_ranks: OnRanks, size: int, dtype: torch.dtype
) -> None:
    on_ranks(_fused_experts, size, dtype)


def _experts_of_a_moe_layer_are_sharded(world: World) -> None:
    """A rank holds the router and its share of the experts of nn.MoE."""
    whole = MoE(24, 20, NUM_EXPERTS, top_k=2, bias=True)
    per_rank = NUM_EXPERTS // 8
    mine = MoE(24, 20, per_rank, top_k=1, bias=True).experts
    shard = slice(world.rank * per_rank, (world.rank + 1) * per_rank)
    mine.load_state_dict({name: each[shard] for name, each in whole.experts.state_dict().items()})
    x = torch.randn(8 * 5, 24)
    everything = whole.route(x)
    tokens = slice(5 * world.rank, 5 * world.rank + 5)
    plan = RoutingPlan.from_choices(
        everything.expert_ids[tokens], everything.probs[tokens], NUM_EXPERTS
    )
    output = expert_parallel(x[tokens], plan, mine, world.groups[8])
    expected = whole(x, plan=everything)
    assert torch.equal(output, expected[tokens])
    grad = torch.randn(expected.shape)
    exact = dict(
        zip(whole.experts.state_dict(), expert_grads(whole.experts, expected, grad), strict=True)
    )
    got = dict(zip(mine.state_dict(), expert_grads(mine, output, grad[tokens]), strict=True))
    for name, value in got.items():
        torch.testing.assert_close(value, exact[name][shard])


def _checkpointing_keeps_the_gradients_of_chunks(world: World) -> None:
    from torch.utils.checkpoint import checkpoint

    mine = problem("uneven", 8, torch.bfloat16).part(world.rank, 8)
    weights = [mine.w1, mine.w2]

    def layer(input: torch.Tensor, inside: bool = False) -> torch.Tensor:
        def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
            return moe_mlp(rows, plan, mine.w1.mT, mine.w2.mT, gated=False)

        def again(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
            return checkpoint(here, rows, plan, use_reentrant=False)

        experts = again if inside else here
        return expert_parallel(input, mine.plan(), experts, world.groups[8], chunks=3)

    plain = torch.autograd.grad(layer(mine.input), weights, mine.grad)
    inside = torch.autograd.grad(layer(mine.input, True), weights, mine.grad)
    around = checkpoint(layer, mine.input, use_reentrant=False)
    outside = torch.autograd.grad(around, weights, mine.grad)
    checkpoint(layer, mine.input, use_reentrant=True).backward(mine.grad)
    for got in (inside, outside, [weight.grad for weight in weights]):
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


ON_EIGHT = (
    _processes_give_the_bits_of_one,
    _a_mesh_serves_as_group,
    _rows_arrive_in_the_order_of_one_process,
    _float8_rounds_rows_and_keeps_gradients,
    _experts_that_ignore_their_rows_do_not_hang_the_backward,
    _checkpointing_gives_the_same_gradients,
    _a_graph_can_be_differentiated_again,
    _compile_does_not_break_around_it,
    _experts_of_a_moe_layer_are_sharded,
    _checkpointing_keeps_the_gradients_of_chunks,
)


@pytest.mark.parametrize("check", ON_EIGHT, ids=lambda check: check.__name__[1:])
def test_on_eight_processes(on_ranks: OnRanks, check: Callable[[World], None]) -> None:
    on_ranks(check)
