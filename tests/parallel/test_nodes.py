"""Experts sharded over nodes of several ranks: a token crosses to a node once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_layer import CASES, NUM_EXPERTS, assert_case, problem
from process_pool import World
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fusedops.parallel import moe_combine, moe_dispatch
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
RANKS = 8


def _mesh(nodes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (nodes, RANKS // nodes), mesh_dim_names=("node", "local"))


def _cases(rank: int, nodes: int, dtype: torch.dtype, chunks: int, reduce: str) -> None:
    mesh = _mesh(nodes)
    for name in CASES:
        place, options = (rank, RANKS), {"chunks": chunks, "reduce": reduce}
        assert_case(name, mesh, place, dtype, depth=999, **options)


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
