"""Experts sharded over nodes of several ranks: a token crosses to a node once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_layer import (
    CASES,
    NUM_EXPERTS,
    assert_within_budget,
    expected,
    experts,
    gradients,
    problem,
)
from process_pool import World
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fusedops import RoutingPlan
from fusedops.parallel import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.comm import collectives
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
RANKS = 8


def _mesh(nodes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (nodes, RANKS // nodes), mesh_dim_names=("node", "local"))


def _cases(rank: int, nodes: int, dtype: torch.dtype, chunks: int, reduce: str) -> None:
    mesh = _mesh(nodes)
    per_rank = NUM_EXPERTS // RANKS
    shard = slice(rank * per_rank, (rank + 1) * per_rank)
    for name in CASES:
        whole, known = problem(name, RANKS, dtype), expected(name, RANKS, dtype)
        mine = whole.part(rank, RANKS)
        first = sum(whole.counts[:rank])
        tokens = slice(first, first + len(mine.input))

        def here(rows: torch.Tensor, plan: RoutingPlan, mine: Any = mine) -> torch.Tensor:
            return experts(rows, plan, mine.w1, mine.w2)

        output = expert_parallel(
            mine.input, mine.plan(), here, mesh, weighted=True, chunks=chunks, reduce=reduce
        )
        where = f"{name} on {nodes} nodes"
        if reduce == "source":
            assert torch.equal(output, known.output[tokens]), f"{where}: other bits"
        else:
            truth, alone = known.true_output[tokens], known.output[tokens]
            assert_within_budget(output, truth, alone, where, 999)
        grads = gradients(output, mine)
        parts = (tokens, tokens, shard, shard)
        for i, (grad, part) in enumerate(zip(grads, parts, strict=True)):
            truth, alone = known.true_gradients[i][part], known.gradients[i][part]
            assert_within_budget(grad, truth, alone, f"{where}: gradient {i}", 999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_nodes_give_the_bits_of_one_process(nodes: int, dtype: torch.dtype) -> None:
    threads.run(_cases, RANKS, nodes, dtype, 1, "source")


def _on_processes(world: World) -> None:
    _cases(world.rank, 2, torch.bfloat16, 3, "source")


def test_chunks_over_nodes_of_processes_give_the_same_bits(on_ranks: OnRanks) -> None:
    on_ranks(_on_processes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_sums_made_in_the_nodes_are_within_the_budget(dtype: torch.dtype) -> None:
    threads.run(_cases, RANKS, 2, dtype, 2, "node")


def _bytes_between_nodes(world: World, nodes: int) -> tuple[int, int, int, int]:
    """Return rows and bytes that leave the node, sent straight and once per node."""
    mesh, per_node = _mesh(nodes), RANKS // nodes
    mine = problem("random", RANKS, torch.bfloat16).part(world.rank, RANKS)
    node = world.rank // per_node
    plan = mine.plan()
    straight = moe_dispatch(mine.input, plan, world.groups[RANKS])[2]
    once = moe_dispatch(mine.input, plan, mesh)[2]
    far = [rows for rank, rows in enumerate(straight.rows_sent) if rank // per_node != node]
    few = [rows for other, rows in enumerate(once.rows_sent) if other != node]
    places = mine.ids // (NUM_EXPERTS // nodes)
    pairs = [(token, int(n)) for token, row in enumerate(places) for n in set(row.tolist())]
    assert sum(far) == int((places != node).sum())
    assert sum(few) == sum(n != node for _, n in pairs)
    return sum(far), sum(few), sum(far) * straight.row_bytes, sum(few) * once.row_bytes


def test_a_token_crosses_to_a_node_once(on_ranks: OnRanks) -> None:
    """Rows between nodes are fewer by the duplication factor, bytes by nearly as much."""
    counts = on_ranks(_bytes_between_nodes, 2)
    many, few, bytes_many, bytes_few = (sum(each) for each in zip(*counts, strict=True))
    assert many / few > 1.4  # three slots on two nodes: 1.5 slots per token and node on average
    # Each row carries the ids and probabilities of all three slots: here 80 instead of 64 bytes.
    assert bytes_few * 64 == bytes_many * 80 * few // many
    assert bytes_few < bytes_many


def _collectives(world: World) -> dict[str, int]:
    mesh = _mesh(2)
    mine = problem("uneven", RANKS, torch.float32).part(world.rank, RANKS)
    counts = {}
    with collectives.recorded() as log:
        rows, _, handle = moe_dispatch(mine.input, mine.plan(), mesh)
    counts["dispatch"] = len(log.calls)
    with collectives.recorded() as log:
        output = moe_combine(rows, handle, weighted=True)
    counts["combine"] = len(log.calls)
    with collectives.recorded() as log:
        torch.autograd.grad(output, [mine.input], mine.grad)
    counts["backward"] = len(log.calls)
    return counts


def test_two_collectives_per_direction_and_dimension(on_ranks: OnRanks) -> None:
    for counts in on_ranks(_collectives):
        assert counts == {"dispatch": 4, "combine": 2, "backward": 4}


def _float8(world: World) -> None:
    """Rounding twice on the way is rounding once."""
    mesh = _mesh(2)
    mine = problem("uneven", RANKS, torch.bfloat16).part(world.rank, RANKS)
    outputs = []
    for group in (mesh, world.groups[RANKS]):
        rows, _, handle = moe_dispatch(mine.input, mine.plan(), group, payload="float8")
        outputs.append(moe_combine(rows, handle, weighted=True))
    assert torch.equal(*outputs)


def test_float8_payload_rounds_once(on_ranks: OnRanks) -> None:
    on_ranks(_float8)


def _drops(world: World) -> tuple[int, int]:
    mine = problem("capacity_one", RANKS, torch.float32).part(world.rank, RANKS)
    handle = moe_dispatch(mine.input, mine.plan(), _mesh(2))[2]
    return handle.num_dropped, handle.num_dropped_in_group


def test_dropped_slots_are_counted_over_all_nodes(on_ranks: OnRanks) -> None:
    whole = problem("capacity_one", RANKS, torch.float32)
    assert whole.kept is not None
    dropped = [int((~part).sum()) for part in whole.kept.split(whole.counts)]
    assert on_ranks(_drops) == [(mine, sum(dropped)) for mine in dropped]


def _one_is_wrong(world: World, fault: str, chunks: int) -> str:
    mesh = _mesh(2)
    mine = problem("uneven", RANKS, torch.float32).part(world.rank, RANKS)
    input, plan, reduce = mine.input, mine.plan(), "source"
    bad = world.rank == 6
    if bad and fault == "mismatch":
        input = input[:-1]
    elif bad and fault == "ids":
        plan = RoutingPlan(**{**vars(plan), "expert_ids": plan.expert_ids - 1})
    elif bad and fault == "disagree":
        input = input[:, :8]
    elif bad and fault == "reduce":
        reduce = "node"

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows[1:] if bad and fault == "result" else rows

    try:
        expert_parallel(input, plan, here, mesh, reduce=reduce, chunks=chunks, validate=True)
    except (TypeError, ValueError) as error:
        dist.barrier(world.groups[RANKS])
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("fault", ["mismatch", "ids", "disagree", "reduce", "result"])
def test_bad_input_on_one_rank_raises_on_all_ranks_of_all_nodes(
    on_ranks: OnRanks, fault: str, chunks: int
) -> None:
    errors = on_ranks(_one_is_wrong, fault, chunks)
    for error in errors:
        assert error.startswith("ValueError"), error
    if fault == "result":
        assert "output must be of shape" in errors[6]
        assert all("a rank of node 1 got" in error for error in errors[:4]), errors
        assert all("rank 2 of this node got" in errors[rank] for rank in (4, 5, 7)), errors
