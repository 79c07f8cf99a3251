"""Ranks tell each other errors and objects, over a group of hosts where theirs takes no objects."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from run_ranks import on_threads
from torch import distributed as dist

from fusedops.parallel.collective_errors import gather_objects, raise_on_all, vote
from fusedops.parallel.comm import host_groups
from fusedops.parallel.comm.host_groups import host_group

OnProcesses = Callable[..., list[Any]]
RANKS, WRONG = 4, 2
CPU = torch.device("cpu")


def assert_works() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == RANKS


@on_threads(RANKS)
def test_an_error_of_one_rank_is_raised_on_all(rank: int) -> None:
    with pytest.raises(RuntimeError, match="^{2: 'the disk is full'}$"):
        with raise_on_all(OSError, lambda errors: RuntimeError(str(errors)), dist.group.WORLD):
            if rank == WRONG:
                raise OSError("the disk is full")
    assert_works()


@pytest.mark.parametrize(
    ("kind", "report"),
    [
        (TypeError, "got an argument of a wrong type"),
        (ValueError, "got arguments that do not fit each other or the group"),
    ],
)
@on_threads(RANKS)
def test_a_vote_names_the_rank_and_its_error(rank: int, kind: type[Exception], report: str) -> None:
    expected = (kind, "^mine$") if rank == WRONG else (ValueError, f"^op: rank 2 of .* {report}$")
    with pytest.raises(expected[0], match=expected[1]):
        vote("op", [dist.group.WORLD], kind("mine") if rank == WRONG else None)
    assert_works()


def test_without_a_group_only_the_given_kinds_are_converted() -> None:
    with pytest.raises(RuntimeError, match=r"\{0: 'wrong'\}"):
        with raise_on_all(ValueError, lambda errors: RuntimeError(str(errors)), None):
            raise ValueError("wrong")
    with pytest.raises(KeyError):
        with raise_on_all(ValueError, lambda errors: RuntimeError(str(errors)), None):
            raise KeyError("other")


# There is no GPU here: a group of gloo is said not to take what it does take, as one of NCCL.


def _connected(rank: int, disconnected: int | None) -> tuple[bool, bool, float | None]:
    """Return whether the companion is another group, the same the second time, and a sum."""
    group: Any = dist.new_group(list(range(RANKS)))
    assert host_group(group, CPU) is group
    takes, companion = host_groups._takes_cpu, host_groups._companion
    if rank == disconnected:
        companion = lambda *_: None  # noqa: E731
    with (
        mock.patch.object(host_groups, "_takes_cpu", lambda g: g is not group and takes(g)),
        mock.patch.object(host_groups, "_TIME_TO_CONNECT", timedelta(seconds=1)),
        mock.patch.object(host_groups, "_companion", companion),
    ):
        first, second = (host_group(group, CPU) for _ in range(2))
    total = None
    if first is not None:
        numbers = torch.tensor([float(rank)])
        dist.all_reduce(numbers, group=first)
        total = float(numbers)
    dist.barrier()
    return first is not None and first is not group, first is second, total


def test_a_companion_joins_the_same_ranks(on_processes: OnProcesses) -> None:
    assert on_processes(_connected, RANKS, None) == [(True, True, float(sum(range(RANKS))))] * RANKS


def test_none_uses_a_companion_that_one_rank_lacks(on_processes: OnProcesses) -> None:
    assert on_processes(_connected, RANKS, 3) == [(False, True, None)] * RANKS


def _gathered(rank: int) -> bool:
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
        assert gather_objects(rank, group) == ranks
    dist.barrier()
    return used == [hosts]


def test_objects_are_gathered_by_the_group_of_hosts(on_processes: OnProcesses) -> None:
    assert on_processes(_gathered, RANKS) == [True] * RANKS
