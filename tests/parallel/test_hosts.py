"""A result that does not fit, where the ranks' groups take no tensors on the CPU, as NCCL's.

There is no GPU here: groups of gloo are said not to take what they do take. Hosts then talk over
companions, as they do beside NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from expert_layer import problem
from process_pool import World
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fusedops.parallel import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.collective_errors import ErrorVote
from fusedops.parallel.comm import host_groups
from fusedops.parallel.expert import dispatcher
from fusedops.parallel.expert.arguments import groups_of

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
RANKS, WRONG = 8, 5
Shape = tuple[int, ...]
over_both = pytest.mark.parametrize("shape", [(RANKS,), (2, 4)], ids=str)


@contextmanager
def _taking_nothing_from_the_host(shape: Shape) -> Iterator[Any]:
    """Yield new groups of all ranks, none of which takes tensors on the CPU."""
    mesh: Any = dist.new_group(list(range(RANKS)))
    if len(shape) > 1:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
    groups = groups_of("test", mesh)
    takes = host_groups._takes_cpu
    with mock.patch.object(
        host_groups, "_takes_cpu", lambda group: group not in groups and takes(group)
    ):
        yield mesh


def _bad_result(world: World, shape: Shape, fault: str, how: str) -> tuple[str, bool]:
    """Return the error of a rank, and whether the group works afterwards."""
    mine = problem("uneven", RANKS, torch.float32).part(world.rank, RANKS)

    def here(rows: torch.Tensor, _: Any = None) -> Any:
        wrong = {"shape": rows[:-1], "dtype": rows.double(), "type": None}[fault]
        return wrong if world.rank == WRONG else rows

    def layer(experts: Any, mesh: Any) -> torch.Tensor:
        if how != "by hand":
            options = {"chunks": 3} if how == "chunks" else {"max_rows": 200}
            return expert_parallel(mine.input, mine.plan(), experts, mesh, **options)
        rows, _, handle = moe_dispatch(mine.input, mine.plan(), mesh)
        return moe_combine(experts(rows), handle)

    with _taking_nothing_from_the_host(shape) as mesh:
        error = "no error"
        try:
            layer(here, mesh)
        except (TypeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        again = layer(lambda rows, _=None: rows, mesh)
        got = torch.autograd.grad(again.sum(), mine.input)[0]
    expected = mine.input * 3  # three slots, each of which returns the row
    works = torch.allclose(again, expected) and torch.allclose(got, torch.full_like(got, 3.0))
    return error, works


@over_both
@pytest.mark.parametrize("how", ["by hand", "chunks", "operators"])
@pytest.mark.parametrize(
    ("fault", "own"),
    [
        ("shape", "ValueError: moe_combine: output must be of shape"),
        ("dtype", "TypeError: moe_combine: output must have the dtype of the rows"),
        ("type", "TypeError: moe_combine: output must be a torch.Tensor"),
    ],
)
def test_bad_results_on_one_rank_raise_on_all(
    on_ranks: OnRanks, shape: Shape, how: str, fault: str, own: str
) -> None:
    if how == "operators" and fault == "type":
        pytest.skip("an operator takes nothing but tensors")
    for rank, (error, works) in enumerate(on_ranks(_bad_result, shape, fault, how)):
        assert works, f"rank {rank}: the group is of no use after: {error}"
        if rank == WRONG:
            assert error.startswith(own), error
        else:
            assert error.startswith("ValueError: moe_combine: ") and " got a" in error, error


def _votes(world: World, shape: Shape) -> list[tuple[str, bool]]:
    """Return where the error votes are, and whether they are exchanged over groups of the mesh."""
    seen: list[tuple[str, bool]] = []
    mine = problem("uneven", RANKS, torch.float32).part(world.rank, RANKS)
    with _taking_nothing_from_the_host(shape) as mesh:

        def recorded(op: str, groups: Any, *args: Any) -> ErrorVote:
            vote = ErrorVote(op, groups, *args)
            theirs = groups_of("test", mesh)
            seen.append((vote._sent.device.type, any(group in theirs for group in groups)))
            return vote

        for _ in range(2):
            rows, _, handle = moe_dispatch(mine.input, mine.plan(), mesh)
            with mock.patch.object(dispatcher, "ErrorVote", recorded):
                moe_combine(rows, handle)
    return seen


@over_both
def test_the_error_vote_never_touches_the_device(on_ranks: OnRanks, shape: Shape) -> None:
    """It is in host memory, and is exchanged over other groups than the rows."""
    assert on_ranks(_votes, shape) == [[("cpu", False)] * 2] * RANKS


def _one_cannot_connect(world: World, shape: Shape) -> tuple[bool, bool]:
    mine = problem("uneven", RANKS, torch.float32).part(world.rank, RANKS)
    companion = host_groups._companion
    if world.rank == 3:
        companion = lambda *_: None  # noqa: E731
    brief = mock.patch.object(host_groups, "_TIME_TO_CONNECT", timedelta(seconds=2))
    lame = mock.patch.object(host_groups, "_companion", companion)
    with _taking_nothing_from_the_host(shape) as mesh, brief, lame:
        rows, _, handle = moe_dispatch(mine.input, mine.plan(), mesh)
        output = moe_combine(rows, handle)
        found = host_groups.hosts_of(groups_of("test", mesh)[::-1])
    dist.barrier(world.groups[RANKS])
    return found is None, torch.allclose(output, 3 * mine.input)


@pytest.mark.parametrize("shape", [(RANKS,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
def test_none_uses_connections_that_one_rank_lacks(on_ranks: OnRanks, shape: Shape) -> None:
    assert on_ranks(_one_cannot_connect, shape) == [(True, True)] * RANKS
