"""Who is with whom: the groups of a mesh, as numbers and as process groups."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_pool import World
from torch import distributed as dist

from fusedops._core.collectives import all_gather_single
from fusedops.parallel import Sizes, make_mesh, rank_groups
from fusedops.parallel.mesh import connect
from fusedops.testing import threads

OnRanks = Callable[..., list[Any]]

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


def test_groups_of_4096_ranks_take_less_than_two_seconds() -> None:
    sizes = Sizes(pp=8, dp=16, cp=4, tp=8, ep=32)
    begin = time.process_time()
    groups = rank_groups(sizes)
    assert time.process_time() - begin < 2
    assert {name: (len(group), len(group[0])) for name, group in groups.items()} == {
        "pp": (512, 8),
        "dp": (256, 16),
        "cp": (1024, 4),
        "tp": (512, 8),
        "data": (64, 64),
        "stage": (8, 512),
        "edp": (2048, 2),
        "ep": (128, 32),
        "expert_data": (256, 16),
    }


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


NAMES = ("pp", "dp", "cp", "tp", "data", "edp", "ep", "expert_data", "stage")


def _members(world: World, sizes: Sizes) -> dict[str, list[int]]:
    """Return the ranks of each group of this process, as the group and as a gather tell them."""
    mesh = make_mesh(sizes)
    found = {}
    for name in NAMES:
        ranks = dist.get_process_group_ranks(mesh.group(name))
        gathered = torch.empty(len(ranks), dtype=torch.int64)
        all_gather_single(gathered, torch.tensor([world.rank]), group=mesh.group(name))
        assert gathered.tolist() == ranks
        assert ranks[mesh.rank(name)] == world.rank
        found[name] = ranks
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "sizes",
    [Sizes(dp=2, cp=2, tp=2, ep=2), Sizes(dp=4, tp=2, ep=2), Sizes(pp=2, dp=2, cp=2, ep=4)],
    ids=["dp2cp2tp2ep2", "dp4tp2ep2", "pp2dp2cp2ep4"],
)
def test_a_mesh_has_the_groups_of_the_pure_function(on_ranks: OnRanks, sizes: Sizes) -> None:
    expected = rank_groups(sizes)
    for rank, answer in enumerate(on_ranks(_members, sizes)):
        for name, ranks in answer.items():
            assert ranks == next(each for each in expected[name] if rank in each), (rank, name)


def _refused(world: World) -> str:
    try:
        make_mesh(Sizes(dp=2, tp=3))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_mesh_of_another_world_size_is_refused_on_every_rank(on_ranks: OnRanks) -> None:
    words = "pp x dp x cp x tp = 1 x 2 x 1 x 3 = 6 must be the 8 processes"
    assert all(words in answer for answer in on_ranks(_refused))


def _connected(rank: int) -> list[list[int]]:
    """Return the groups that an all-reduce of this rank began, in order."""
    mesh = make_mesh(Sizes(pp=2, dp=2, tp=2, ep=2))
    began: list[list[int]] = []

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        began.append(dist.get_process_group_ranks(group))
        dist.all_reduce(tensor, group=group)

    connect(mesh, torch.device("cpu"), all_reduce)
    return began


def test_each_group_begins_with_a_collective_of_all_its_ranks() -> None:
    """NCCL hangs where the first communication of a group is a transfer that some ranks skip."""
    groups = rank_groups(Sizes(pp=2, dp=2, tp=2, ep=2))
    for rank, began in enumerate(threads.run(_connected, 8)):
        mine = [group for of_name in groups.values() for group in of_name if rank in group]
        expected = {tuple(group) for group in mine if len(group) > 1}
        assert {tuple(group) for group in began} == expected


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
