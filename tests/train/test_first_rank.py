"""Rank 0 prepares what all read: the others wait for it without a collective, which would end."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import distributed as dist

from fusedops.launch.processes import Ranks


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_wait_until_rank_0_has_left_the_block(fails: bool) -> None:
    store = dist.HashStore()
    ranks = [Ranks(rank, 3, torch.device("cpu"), store) for rank in range(3)]
    left: list[int] = []
    may_end = threading.Event()

    def prepare(of: Ranks) -> None:
        for turn in range(2):
            try:
                with of.first() as is_first:
                    assert is_first == (of.rank == 0)
                    if is_first:
                        may_end.wait()
                        left.append(turn)
                        if fails:
                            raise ValueError("no such text")
            except ValueError:
                continue
            if not is_first:
                left.append(of.rank)

    threads = [threading.Thread(target=prepare, args=(of,)) for of in ranks]
    for thread in threads:
        thread.start()
    threads[1].join(timeout=0.3)
    assert threads[1].is_alive() and threads[2].is_alive() and not left
    may_end.set()
    for thread in threads:
        thread.join(timeout=30)
    assert left[0] == 0 and sorted(left) == [0, 1, 1, 1, 2, 2]


def test_one_process_waits_for_nobody() -> None:
    with Ranks(0, 1, torch.device("cpu"), dist.HashStore()).first() as is_first:
        assert is_first
