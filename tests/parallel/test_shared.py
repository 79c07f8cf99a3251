"""Collectives of one machine through shared memory: values, bits, order and failures."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from run_ranks import on_fresh_ranks
from torch import distributed as dist

from fusedops._core import env, extension
from fusedops.parallel.comm import collectives
from fusedops.runtime import shared_memory

needs_channel = pytest.mark.skipif(
    extension.cpu_library() is not None or not hasattr(os, "memfd_create"),
    reason="needs the C++ library and Linux",
)
pytestmark = [pytest.mark.distributed, needs_channel]
OnProcesses = Callable[..., list[Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RING = 8 << 20  # bytes that a rank can have on the way


def _given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: numbers that show the order of a sum, subnormal ones among them."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator)
    values *= 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    values.view(-1)[::7] *= torch.finfo(dtype).tiny / 8
    return values.to(dtype)


def _collectives(rank: int, ranks: int, dtype: torch.dtype, rows: int) -> list[str]:
    """Return the sums and exchanges whose result is another than that of tensors in one place."""
    group = dist.group.WORLD
    all_given = [_given(index, (rows, 3), dtype) for index in range(ranks)]
    mine = all_given[rank]
    summed = collectives.ordered_sum(all_given)
    wanted = {"all_reduce": summed, "reduce_scatter": summed.chunk(ranks)[rank]}
    # To each other rank as many rows as its distance; to the next but one none.
    counts = [0 if far in (0, 2) else far * rows // 8 for far in range(ranks)]
    ends = {far: all_given[rank - far].flatten()[: 3 * counts[far]] for far in range(1, ranks)}
    senders = sorted(ends, key=lambda far: (rank - far) % ranks)
    wanted["exchange"] = torch.cat([ends[far] for far in senders])
    sends = {(rank + far) % ranks: mine.flatten()[: 3 * counts[far]] for far in range(1, ranks)}
    receives = {(rank - far) % ranks: 3 * counts[far] for far in range(1, ranks)}
    found = {
        "exchange": collectives.exchange(
            sends, receives, group, longest=3 * max(counts), like=mine
        ),
        "all_reduce": collectives.all_reduce(mine.clone(), group),
        "reduce_scatter": collectives.reduce_scatter(mine, group),
    }
    assert shared_memory._channels[group] is not None
    # Asked for in the other order: finishing the last one finishes all.
    results = {name: found[name].wait() for name in reversed(found)}
    return [name for name in wanted if not torch.equal(results[name], wanted[name])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_give_the_bits_of_one_place(
    on_processes: OnProcesses, ranks: int, dtype: torch.dtype
) -> None:
    for rows in (8, 344):
        assert on_processes(_collectives, ranks, ranks, dtype, rows) == [[]] * ranks


def test_tensors_larger_than_the_ring(on_processes: OnProcesses) -> None:
    rows = RING // 4 * 5 // 4 // 3 // 8 * 8
    assert on_processes(_collectives, 2, 2, torch.float32, rows) == [[]] * 2


def _more_is_started_than_the_ring_holds(rank: int) -> bool:
    group = dist.group.WORLD
    tensors = [torch.full((300_000,), float(index + rank)) for index in range(24)]
    pending = [collectives.all_reduce(tensor, group) for tensor in tensors]
    small = collectives.all_gather(torch.tensor([rank]), group).wait()
    values = [float(each.wait()[-1]) for each in pending]
    return values == [2.0 * each + 1 for each in range(24)] and small.tolist() == [0, 1]


def _unwilling(rank: int, why: str) -> tuple[bool, float]:
    group = dist.group.WORLD
    unwilling = mock.patch.dict(os.environ, {"FUSEDOPS_SHARED_MEMORY": "0"})
    if why == "_machine":
        unwilling = mock.patch.object(shared_memory, "_machine", lambda: 5)
    with unwilling if rank == 2 else contextlib.nullcontext():
        summed = collectives.all_reduce(torch.tensor(float(rank)), group).wait()
    return shared_memory._channels[group] is None, float(summed)


@pytest.mark.parametrize("why", ["FUSEDOPS_SHARED_MEMORY", "_machine"])
def test_ranks_agree_on_sockets_where_one_does_not_share(
    on_processes: OnProcesses, why: str
) -> None:
    assert on_processes(_unwilling, 4, why) == [(True, 6.0)] * 4


def _python_runs_while_a_rank_waits(rank: int) -> bool:
    """Rank 1 comes only once Python has run on rank 0, which waits for it in another thread."""
    group, word = dist.group.WORLD, torch.ones(1)
    collectives.all_reduce(torch.ones(1), group).wait()
    if rank == 1:
        dist.recv(word, group=group, group_src=0)
        collectives.all_reduce(torch.ones(1), group).wait()
        return True
    thread = threading.Thread(target=collectives.all_reduce(torch.ones(1), group).wait)
    thread.start()
    thread.join(0.1)
    waited = thread.is_alive()
    dist.send(word, group=group, group_dst=1)
    thread.join()
    return waited


def _a_forked_child_does_not_close_the_ring(rank: int) -> list[float]:
    group = dist.group.WORLD
    # More than a ring holds: the parent has a progress thread, its child has none.
    for each in [collectives.all_reduce(torch.ones(1), group) for _ in range(40)]:
        each.wait()
    child = os.fork()
    if child == 0:
        try:
            collectives.all_reduce(torch.ones(1), group)
        except RuntimeError as error:
            shared_memory._channels.clear()  # as the interpreter does when it ends
            os._exit(0 if "a forked process cannot use" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    threading.Event().wait(0.2 * rank)  # so that the other looks whether this one has left
    return [float(collectives.all_reduce(torch.full((1,), 0.5), group).wait()) for _ in range(2)]


def _alone(rank: int, how: str) -> str:
    """Return what rank 0 is told of rank 1, which is gone."""
    group = dist.group.WORLD
    collectives.all_reduce(torch.ones(3), group).wait()
    if how == "late":  # than a timeout that was set after they had met
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "left":
            shared_memory._channels.clear()
        time.sleep(3.0)
        return ""
    with pytest.raises(dist.DistNetworkError) as error:
        collectives.all_reduce(torch.ones(3), group).wait()
    # Later ones fail at once, with no other reason.
    with pytest.raises(dist.DistNetworkError, match="rank 1 of its group"):
        collectives.all_reduce(torch.ones(3), group).wait()
    return str(error.value)


@pytest.mark.parametrize("how", ["killed", "left", "late"])
def test_a_rank_that_is_gone_is_named(how: str) -> None:
    message, other = on_fresh_ranks(2, _alone, how, patience=60.0)
    assert "rank 1 of its group of 2" in message
    assert ("did not come within 1 s" if how == "late" else "has ended") in message
    assert other == ("died" if how == "killed" else "")


def _a_communication_is_waited_for_once(rank: int) -> str:
    pending = collectives.all_reduce(torch.ones(1), dist.group.WORLD)
    pending.wait()
    with pytest.raises(RuntimeError) as error:
        pending.wait()
    return str(error.value)


PROGRAMS: dict[Callable[[int], Any], Any] = {
    _more_is_started_than_the_ring_holds: True,
    _python_runs_while_a_rank_waits: True,
    _a_forked_child_does_not_close_the_ring: [1.0] * 2,
    _a_communication_is_waited_for_once: "wait was called twice for one communication",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_programs_of_two_ranks(on_processes: OnProcesses, program: Callable[[int], Any]) -> None:
    assert on_processes(program, 2) == [PROGRAMS[program]] * 2


def test_the_variable_is_known(monkeypatch: Any) -> None:
    monkeypatch.setenv("FUSEDOPS_SHARED_MEMORY", "yes")
    assert env.shared_memory_disabled()
    assert any("FUSEDOPS_SHARED_MEMORY" in mistake for mistake in env.mistakes(["cpp"]))
