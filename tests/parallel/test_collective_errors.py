"""An error of one rank is raised on all ranks, and the group works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_pool import World
from torch import distributed as dist

from fusedops.parallel.collective_errors import raise_on_all, vote

OnRanks = Callable[..., list[Any]]
RANKS, WRONG = 4, 2


def _works(group: dist.ProcessGroup) -> bool:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item() == RANKS


def _block(world: World) -> tuple[str, bool]:
    group = world.group(RANKS)
    if not world.member(RANKS):
        return "", True
    try:
        with raise_on_all(OSError, lambda errors: RuntimeError(str(errors)), group):
            if world.rank == WRONG:
                raise OSError("the disk is full")
    except RuntimeError as error:
        return str(error), _works(group)
    return "no error", _works(group)


@pytest.mark.distributed
def test_an_error_of_one_rank_is_raised_on_all(on_ranks: OnRanks) -> None:
    assert on_ranks(_block)[:RANKS] == [("{2: 'the disk is full'}", True)] * RANKS


def _vote(world: World, kind: type[Exception]) -> tuple[str, bool]:
    group = world.group(RANKS)
    if not world.member(RANKS):
        return "", True
    own = kind("mine") if world.rank == WRONG else None
    try:
        vote("op", [group], own)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", _works(group)
    return "no error", _works(group)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "report"),
    [
        (TypeError, "got an argument of a wrong type"),
        (ValueError, "got arguments that do not fit each other or the group"),
    ],
)
def test_a_vote_names_the_rank_and_its_error(
    on_ranks: OnRanks, kind: type[Exception], report: str
) -> None:
    expected = [(f"ValueError: op: rank {WRONG} of the group {report}", True)] * RANKS
    expected[WRONG] = (f"{kind.__name__}: mine", True)
    assert on_ranks(_vote, kind)[:RANKS] == expected


def test_without_a_group_only_the_given_kinds_are_converted() -> None:
    with pytest.raises(RuntimeError, match=r"\{0: 'wrong'\}"):
        with raise_on_all(ValueError, lambda errors: RuntimeError(str(errors)), None):
            raise ValueError("wrong")
    with pytest.raises(KeyError):
        with raise_on_all(ValueError, lambda errors: RuntimeError(str(errors)), None):
            raise KeyError("other")
