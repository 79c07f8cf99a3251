"""Groups over which hosts communicate, where the ranks' group takes no tensors on the CPU.

There is no GPU here: a group of gloo is said not to take what it does take, as one of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from process_pool import World
from torch import distributed as dist

from fusedops.parallel.collective_errors import gather_objects
from fusedops.parallel.comm import host_groups
from fusedops.parallel.comm.host_groups import host_group

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
RANKS, CPU = 8, torch.device("cpu")


def _connected(world: World, disconnected: int | None) -> tuple[bool, bool, float | None]:
    """Return whether the companion is another group, the same the second time, and a sum."""
    group: Any = dist.new_group(list(range(RANKS)))
    assert host_group(group, CPU) is group
    takes, companion = host_groups._takes_cpu, host_groups._companion
    if world.rank == disconnected:
        companion = lambda *_: None  # noqa: E731
    with (
        mock.patch.object(host_groups, "_takes_cpu", lambda g: g is not group and takes(g)),
        mock.patch.object(host_groups, "_TIME_TO_CONNECT", timedelta(seconds=2)),
        mock.patch.object(host_groups, "_companion", companion),
    ):
        first, second = (host_group(group, CPU) for _ in range(2))
    total = None
    if first is not None:
        numbers = torch.tensor([float(world.rank)])
        dist.all_reduce(numbers, group=first)
        total = float(numbers)
    dist.barrier(world.groups[RANKS])
    return first is not None and first is not group, first is second, total


def test_a_companion_joins_the_same_ranks(on_ranks: OnRanks) -> None:
    assert on_ranks(_connected, None) == [(True, True, float(sum(range(RANKS))))] * RANKS


def test_none_uses_a_companion_that_one_rank_lacks(on_ranks: OnRanks) -> None:
    assert on_ranks(_connected, 3) == [(False, True, None)] * RANKS


def _gathered(world: World) -> bool:
    """Gather objects over a group that takes no tensors on the CPU, and has a group for hosts."""
    ranks = list(range(RANKS))
    group, hosts = dist.new_group(ranks), dist.new_group(ranks)
    host_groups.register(group, hosts)
    takes = host_groups._takes_cpu
    used: list[Any] = []

    def gather(values: list[Any], value: Any, group: Any) -> None:
        used.append(group)
        gather_object(values, value, group=group)

    gather_object = dist.all_gather_object
    with (
        mock.patch.object(host_groups, "_takes_cpu", lambda g: g is not group and takes(g)),
        mock.patch.object(dist, "all_gather_object", gather),
    ):
        assert gather_objects(world.rank, group) == ranks
    dist.barrier(world.groups[RANKS])
    return used == [hosts]


def test_objects_are_gathered_by_the_group_of_hosts(on_ranks: OnRanks) -> None:
    assert on_ranks(_gathered) == [True] * RANKS
