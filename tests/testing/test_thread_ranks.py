"""Ranks as threads compute what gloo processes do, and say what is wrong instead of hanging."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exchanges
import pytest
import torch
from torch import distributed as dist

from fusedops.checkpoint import Checkpointer
from fusedops.testing import RankError, threads
from fusedops.testing.processes import Processes

RANKS = 4


@pytest.mark.distributed
@pytest.mark.parametrize("function", [exchanges.everything, exchanges.models])
def test_threads_get_what_processes_get(function: Callable[..., Any], on_processes: Any) -> None:
    theirs = on_processes(function, RANKS)
    for seed in (0, 1):  # of the order of turns
        ours = threads.run(function, RANKS, seed=seed)
        torch.testing.assert_close(ours, theirs)


def mismatched(rank: int) -> None:
    if rank == 0:
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
    else:
        dist.all_reduce(torch.ones(2))


MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM
# What ranks do, and the error.
WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "other communications": (
        mismatched,
        r"calls all_gather.*calls all_reduce \(sum\) of 2 elements",
    ),
    "other operations": (
        lambda rank: dist.all_reduce(torch.ones(2), MAX if rank else SUM),
        r"\(sum\) of 2 elements.*\(max\)|\(max\) of 2 elements.*\(sum\)",
    ),
    "other sizes": (
        lambda rank: dist.all_reduce(torch.ones(2 + rank)),
        "of 3 elements.*of 2 elements|of 2 elements.*of 3 elements",
    ),
    "no room": (
        lambda rank: dist.all_to_all([torch.ones(1)] * 2, [torch.ones(2)] * 2),
        "has room for 1 elements of torch.float32, and gets 2",
    ),
    "one too many": (
        lambda rank: dist.all_reduce(torch.ones(2)) if rank else None,
        "every rank waits for another one(.|\n)*rank 0 has ended",
    ),
    "both send": (
        lambda rank: dist.send(torch.ones(2), 1 - rank),
        "rank 0 waits for send of 2 elements of from rank 0 to rank 1",
    ),
    "one raises": (exchanges.raises, "KeyError: 'the one that failed'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_hang_or_corrupt_is_an_error_at_once(what: str) -> None:
    function, words = WRONG[what]
    with pytest.raises(RankError, match=words):
        threads.run(function, 2)
    assert threads.run(exchanges.early, 2)[0][1].tolist() == [1.0, 1.0]  # the next run is well


def test_a_rank_that_is_no_cause_raises_nothing() -> None:
    with pytest.raises(RankError) as one:
        threads.run(exchanges.raises, 2)
    with pytest.raises(RankError) as both:
        threads.run(exchanges.all_raise, 2)
    assert set(one.value.errors) == {1}
    assert set(both.value.errors) == {0, 1}


def test_a_result_is_nan_until_it_is_waited_for() -> None:
    for before, after in threads.run(exchanges.early, 2):
        assert all(math.isnan(each) for each in before.tolist())
        assert after.tolist() == [1.0, 1.0]


def test_what_is_sent_is_read_late() -> None:
    assert 7.0 in torch.stack(threads.run(exchanges.reused, 2))


def test_each_rank_draws_its_own_random_numbers() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = threads.run(exchanges.drawn, 2)
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_that_raises_is_told_and_others_take_its_place() -> None:
    with Processes(2) as pool:
        with pytest.raises(RankError, match="the one that failed"):
            pool.run(exchanges.raises, 2, patience=10.0)
        assert [each.tolist() for _, each in pool.run(exchanges.early, 2)] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("block", [True, False])
def test_ranks_that_are_threads_save_in_their_own_thread_alone(tmp_path: Path, block: bool) -> None:
    def save(rank: int) -> str:
        with Checkpointer(tmp_path, torch.nn.Linear(2, 2)) as checkpointer:
            checkpointer.save(3, block=block)
            checkpointer.wait()
            restored = checkpointer.load()
        assert restored is not None and restored.step == 3
        return restored.folder.name

    if block:
        assert threads.run(save, 2) == ["step-0000000003.0"] * 2
    else:
        with pytest.raises(RankError, match="in their own thread .* save a checkpoint with block="):
            threads.run(save, 2, patience=20.0)
