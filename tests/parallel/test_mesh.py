"""Groups of a mesh, errors that their ranks tell each other, and groups of their hosts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from run_ranks import on_threads
from torch import distributed as dist

from fusedops.parallel import Sizes, make_mesh, rank_groups
from fusedops.parallel.collective_errors import raise_on_all, vote
from fusedops.parallel.comm import host_groups
from fusedops.parallel.comm.host_groups import host_group
from fusedops.parallel.mesh import connect
from fusedops.testing import threads

OnProcesses = Callable[..., list[Any]]
DENSE = {"pp": "dct", "dp": "pct", "cp": "pdt", "tp": "pdc", "data": "pt", "stage": "p"}


def test_groups_hold_the_ranks_that_differ_in_their_place_only() -> None:
    """By brute force: two ranks are together if and only if their other coordinates are equal."""
    sizes = Sizes(pp=2, dp=3, cp=2, tp=4, ep=3)
    places = list(itertools.product(range(2), range(3), range(2), range(4)))
    letters = "pdct"
    groups = rank_groups(sizes)
    for name, fixed in DENSE.items():
        expected: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            expected.setdefault(tuple(place[letters.index(c)] for c in fixed), []).append(rank)
        assert sorted(groups[name]) == sorted(expected.values()), name


def test_experts_cut_the_ranks_of_dp_and_cp_again() -> None:
    groups = rank_groups(Sizes(pp=2, dp=2, cp=2, tp=2, ep=2))
    assert groups["data"][0] == [0, 2, 4, 6]
    assert groups["ep"][:2] == [[0, 2], [1, 3]]
    assert groups["edp"][:2] == [[0, 4], [1, 5]]
    assert groups["expert_data"][:2] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for name, group in groups.items():
        assert sorted(sum(group, [])) == list(range(16)), name


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp": 0}, "Sizes: dp must be at least 1, got 0"),
        ({"dp": 4, "cp": 2, "ep": 3}, "a divisor of dp x cp = 8, inside of which it lies, got 3"),
    ],
    ids=["zero", "experts"],
)
def test_sizes_without_a_meaning_are_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sizes(**sizes)


def test_without_torch_distributed_a_mesh_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        make_mesh(Sizes())


@pytest.mark.parametrize(
    "sizes",
    [Sizes(dp=2, cp=2, tp=2, ep=2), Sizes(dp=4, tp=2, ep=2), Sizes(pp=2, dp=2, cp=2, ep=4)],
    ids=["dp2cp2tp2ep2", "dp4tp2ep2", "pp2dp2cp2ep4"],
)
@on_threads(8)
def test_a_mesh_has_the_groups_of_the_pure_function(rank: int, sizes: Sizes) -> None:
    mesh, expected = make_mesh(sizes), rank_groups(sizes)
    for name in expected:
        ranks = dist.get_process_group_ranks(mesh.group(name))
        gathered = [None] * len(ranks)
        dist.all_gather_object(gathered, rank, group=mesh.group(name))
        assert gathered == ranks == next(each for each in expected[name] if rank in each), name
        assert ranks[mesh.rank(name)] == rank


@on_threads(8)
def test_a_mesh_of_another_world_size_is_refused_on_every_rank(rank: int) -> None:
    words = "pp x dp x cp x tp = 1 x 2 x 1 x 3 = 6 must be the 8 processes"
    with pytest.raises(ValueError, match=words):
        make_mesh(Sizes(dp=2, tp=3))


def _connected_groups(rank: int) -> set[str]:
    """Return the groups of more than one rank, by the name that torch has for each."""
    mesh = make_mesh(Sizes(pp=2, dp=2, tp=2, ep=2))
    connect(mesh, torch.device("cpu"))
    groups = [mesh.group(name) for name in rank_groups(mesh.sizes)]
    return {group.group_name for group in groups if group.size() > 1}


def test_each_group_begins_with_a_collective_of_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL hangs where the first communication of a group is a transfer that some ranks skip."""
    began: dict[int, set[str]] = {rank: set() for rank in range(8)}
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        began[dist.get_rank()].add(group.group_name)
        original(tensor, group=group)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for rank, groups in enumerate(threads.run(_connected_groups, 8)):
        assert began[rank] == groups and len(groups) == 7


def test_groups_of_gpus_are_connected_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.parallel import mesh as module

    devices: list[torch.device] = []
    monkeypatch.setattr(module, "connect", lambda mesh, device: devices.append(device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_mesh(Sizes(), device_type="cuda")
    finally:
        dist.destroy_process_group()
    assert devices == [torch.device("cuda", 3)]


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
