"""Who is with whom: the groups of a mesh, as numbers and as process groups."""

from __future__ import annotations

import itertools
import time

import pytest
from run_ranks import on_threads
from torch import distributed as dist

from fusedops.parallel import Sizes, make_mesh, rank_groups

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
    assert all(len(group) * len(group[0]) == 8 * 16 * 4 * 8 for group in groups.values())


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
