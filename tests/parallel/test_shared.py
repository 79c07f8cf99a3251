"""Collectives of one machine through shared memory: values, bits, order and failures."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from process_pool import CONTEXT, World
from torch import distributed as dist

from fusedops._core import env, extension
from fusedops.parallel.comm import collectives
from fusedops.runtime import shared_memory

needs_channel = pytest.mark.skipif(
    extension.cpu_library() is not None or not hasattr(os, "memfd_create"),
    reason="needs the C++ library and Linux",
)
pytestmark = [pytest.mark.distributed, needs_channel]
OnRanks = Callable[..., list[Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RING = 8 << 20  # bytes that a rank can have on the way


def _given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: numbers that show the order of a sum, subnormal ones among them."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator)
    values *= 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    values.view(-1)[::7] *= torch.finfo(dtype).tiny / 8
    return values.to(dtype)


def _collectives(world: World, ranks: int, dtype: torch.dtype, rows: int) -> list[str]:
    """Return the collectives whose result is another than that of all tensors in one place."""
    if not world.member(ranks):
        return []
    group = world.group(ranks)
    all_given = [_given(index, (rows, 3), dtype) for index in range(ranks)]
    mine = all_given[world.rank]
    summed = collectives.ordered_sum(all_given)
    parts = torch.stack([each.unflatten(0, (ranks, -1)) for each in all_given])
    wanted = {
        "all_reduce": summed,
        "all_gather": torch.cat(all_given),
        "reduce_scatter": summed.chunk(ranks)[world.rank],
        "all_to_all": parts[:, world.rank].flatten(0, 1),
        "shift": all_given[world.rank - 1],
        "shift back": all_given[(world.rank + 1) % ranks],
    }
    # To each other rank as many rows as its distance; to the next but one none.
    counts = [0 if far in (0, 2) else far * rows // 8 for far in range(ranks)]
    ends = {
        far: all_given[world.rank - far].flatten()[: 3 * counts[far]] for far in range(1, ranks)
    }
    senders = sorted(ends, key=lambda far: (world.rank - far) % ranks)
    wanted["exchange"] = torch.cat([ends[far] for far in senders])
    sends = {
        (world.rank + far) % ranks: mine.flatten()[: 3 * counts[far]] for far in range(1, ranks)
    }
    receives = {(world.rank - far) % ranks: 3 * counts[far] for far in range(1, ranks)}
    found = {
        "exchange": collectives.exchange(
            sends, receives, group, longest=3 * max(counts), like=mine
        ),
        "all_reduce": collectives.all_reduce(mine.clone(), group),
        "all_gather": collectives.all_gather(mine, group),
        "reduce_scatter": collectives.reduce_scatter(mine, group),
        "all_to_all": collectives.all_to_all(mine, group),
        "shift": collectives.shift(mine, group, by=1),
        "shift back": collectives.shift(mine, group, by=-1),
    }
    assert shared_memory._channels[group] is not None
    # Asked for in the other order: finishing the last one finishes all.
    results = {name: found[name].wait() for name in reversed(found)}
    return [name for name in wanted if not torch.equal(results[name], wanted[name])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_give_the_bits_of_one_place(
    on_ranks: OnRanks, ranks: int, dtype: torch.dtype
) -> None:
    for rows in (8, 344):
        assert on_ranks(_collectives, ranks, dtype, rows) == [[]] * 8


def test_tensors_larger_than_the_ring_and_odd_sizes(on_ranks: OnRanks) -> None:
    rows = RING // 4 * 5 // 4 // 3 // 8 * 8
    assert on_ranks(_collectives, 2, torch.float32, rows) == [[]] * 8
    assert on_ranks(_odd_sizes) == [[]] * 8


def _odd_sizes(world: World) -> list[int]:
    wrong = []
    for size in (1, 5, 63, 65_537):
        for ranks in (2, 8):
            if not world.member(ranks):
                continue
            given = [_given(index, (size,), torch.float32) for index in range(ranks)]
            mine = given[world.rank].clone()
            result = collectives.all_reduce(mine, world.group(ranks)).wait()
            if not torch.equal(result, collectives.ordered_sum(given)) or result is not mine:
                wrong.append(size)
    return wrong


def _more_is_started_than_the_ring_holds(world: World) -> bool:
    if not world.member(2):
        return True
    group = world.group(2)
    tensors = [torch.full((300_000,), float(index + world.rank)) for index in range(24)]
    pending = [collectives.all_reduce(tensor, group) for tensor in tensors]
    small = collectives.all_gather(torch.tensor([world.rank]), group).wait()
    values = [float(each.wait()[-1]) for each in pending]
    return values == [2.0 * each + 1 for each in range(24)] and small.tolist() == [0, 1]


def test_ranks_agree_on_sockets_where_one_does_not_share(on_ranks: OnRanks) -> None:
    assert on_ranks(_unwilling, "FUSEDOPS_SHARED_MEMORY") == [(True, 6.0)] * 8
    assert on_ranks(_unwilling, "_machine") == [(True, 6.0)] * 8


def _unwilling(world: World, why: str) -> tuple[bool, float]:
    group = dist.new_group([0, 1, 2, 3])
    if not world.member(4):
        return True, 6.0
    unwilling = mock.patch.dict(os.environ, {"FUSEDOPS_SHARED_MEMORY": "0"})
    if why == "_machine":
        unwilling = mock.patch.object(shared_memory, "_machine", lambda: 5)
    if world.rank == 2:
        with unwilling:
            summed = collectives.all_reduce(torch.tensor(2.0), group).wait()
    else:
        summed = collectives.all_reduce(torch.tensor(float(world.rank)), group).wait()
    backend_used = shared_memory._channels[group] is None
    dist.destroy_process_group(group)
    return backend_used, float(summed)


def _python_runs_while_a_rank_waits(world: World) -> bool:
    """Rank 1 comes only once Python has run on rank 0, which waits for it in another thread."""
    if not world.member(2):
        return True
    group, word = world.group(2), torch.ones(1)
    collectives.all_reduce(torch.ones(1), group).wait()
    if world.rank == 1:
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


def _a_forked_child_does_not_close_the_ring(world: World) -> list[float]:
    if not world.member(2):
        return [1.0] * 2
    group = world.group(2)
    # More than a ring holds: the parent has a progress thread, its child has none.
    for each in [collectives.all_reduce(torch.ones(1), group) for _ in range(40)]:
        each.wait()
    child = os.fork()
    if child == 0:
        shared_memory._channels.clear()  # as the interpreter does when it ends
        os._exit(0)
    os.waitpid(child, 0)
    threading.Event().wait(0.2 * world.rank)  # so that the other looks whether this one has left
    return [float(collectives.all_reduce(torch.full((1,), 0.5), group).wait()) for _ in range(2)]


def _alone(rank: int, store: str, how: str, ends: Any) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    collectives.all_reduce(torch.ones(3), group).wait()
    if how == "late":  # than a timeout that was set after they had met
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            ends.wait(30)
        if how == "left":
            shared_memory._channels.clear()
            ends.wait(30)
        return
    try:
        collectives.all_reduce(torch.ones(3), group).wait()
    except dist.DistNetworkError as error:
        ends.set()
        # Later ones fail at once, with no other reason.
        with pytest.raises(dist.DistNetworkError, match="rank 1 of its group"):
            collectives.all_reduce(torch.ones(3), group).wait()
        Path(store).with_name("message").write_text(str(error))


@pytest.mark.parametrize("how", ["killed", "left", "late"])
def test_a_rank_that_is_gone_is_named(tmp_path: Path, how: str) -> None:
    ends = CONTEXT.Event()
    processes = [
        CONTEXT.Process(target=_alone, args=(rank, str(tmp_path / "store"), how, ends))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for each in processes:
        each.join(60)
    assert processes[0].exitcode == 0
    message = (tmp_path / "message").read_text()
    assert "rank 1 of its group of 2" in message
    assert ("did not come within 1 s" if how == "late" else "has ended") in message


def _connected() -> Any:
    """Return a channel whose other rank is the same process, with a ring of its own."""
    kind = torch.classes.fusedops_native.SharedChannel
    channels = [kind(rank, 2) for rank in range(2)]
    for rank, channel in enumerate(channels):
        channel.write_secret(rank)
    descriptors = [each.descriptor() for each in channels]
    for each in channels:
        assert each.connect([os.getpid()] * 2, descriptors, [0, 1])
    return channels


def test_a_channel_refuses_another_order_of_calls() -> None:
    kind = torch.classes.fusedops_native.SharedChannel
    one = torch.ones(2)
    with pytest.raises(RuntimeError, match="start was called before connect"):
        kind(0, 2).start("all_reduce", "", one, one, 0)
    with pytest.raises(ValueError, match="no collective 0 was started"):
        kind(0, 2).finish(0, 1.0)
    with pytest.raises(ValueError, match="rank -1 of -1 ranks"):
        kind(-1, -1)
    first, second = _connected()
    with pytest.raises(RuntimeError, match="connect was called before"):
        first.connect([1, 1], [1, 1], [0, 0])
    tensors = torch.full((2,), 1.0), torch.full((2,), 2.0)
    for channel, tensor in zip((first, second), tensors, strict=True):
        assert channel.start("all_reduce", "sum", tensor, tensor, 0) == 0
    for channel in (first, second):
        channel.finish(0, 10.0)
        channel.finish(0, 10.0)  # it is finished already
        with pytest.raises(ValueError, match="no collective 1 was started"):
            channel.finish(1, 10.0)
    assert [each.tolist() for each in tensors] == [[3.0, 3.0]] * 2


def test_a_channel_refuses_wrong_arguments_and_stays_usable() -> None:
    first, second = _connected()
    four = torch.ones(4)
    wrong: list[tuple[str, torch.Tensor, torch.Tensor, int, str]] = [
        ("gossip", four, four, 0, "there is no collective gossip"),
        ("shift", four, torch.empty(4), 2, "no rank 2"),
        ("broadcast", four, four, -1, "no rank -1"),
        ("all_reduce", four.to("meta"), four, 0, "contiguous and on the CPU"),
        ("all_reduce", torch.ones(4, 2).t(), torch.ones(4, 2).t(), 0, "contiguous"),
        ("all_reduce", four, torch.ones(4, dtype=torch.float64), 0, "of one dtype"),
        ("all_reduce", four, torch.ones(3), 0, "does not fit"),
        ("all_gather", four, torch.ones(4), 0, "does not fit"),
        ("all_to_all", torch.ones(3), torch.ones(3), 0, "does not fit"),
        ("all_to_all", four, four, 0, "the input lies in the output"),
        ("all_gather", four[2:], four, 0, "the input lies in the output"),
    ]
    for name, given, taken, source, message in wrong:
        with pytest.raises(ValueError, match=message):
            first.start(name, "", given, taken, source)
    with pytest.raises(TypeError, match="got Long"):
        first.start("all_reduce", "", torch.ones(2, dtype=torch.int64), torch.ones(2).long(), 0)
    empty = torch.ones(0)
    gathered = [torch.full((4,), float(rank)) for rank in range(2)]
    for rank, channel in enumerate((first, second)):
        channel.start("all_reduce", "", empty, empty, 0)
        part = gathered[rank][2 * rank : 2 * rank + 2]  # the place of its own in the result
        channel.start("all_gather", "", part, gathered[rank], 0)
    for channel in (first, second):
        with pytest.raises(ValueError, match="a timeout must be seconds"):
            channel.finish(1, float("nan"))
        channel.finish(1, 10.0)
    assert [each.tolist() for each in gathered] == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_a_forked_process_is_refused() -> None:
    first, _ = _connected()
    child = os.fork()
    if child == 0:
        try:
            first.start("all_reduce", "", torch.ones(1), torch.ones(1), 0)
        except RuntimeError as error:
            os._exit(0 if "a forked process cannot use" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def _a_communication_is_waited_for_once(world: World) -> str:
    pending = collectives.all_reduce(torch.ones(1), world.group(8))
    pending.wait()
    with pytest.raises(RuntimeError) as error:
        pending.wait()
    return str(error.value)


PROGRAMS: dict[Callable[[World], Any], Any] = {
    _more_is_started_than_the_ring_holds: True,
    _python_runs_while_a_rank_waits: True,
    _a_forked_child_does_not_close_the_ring: [1.0] * 2,
    _a_communication_is_waited_for_once: "wait was called twice for one communication",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_programs_of_all_ranks(on_ranks: OnRanks, program: Callable[[World], Any]) -> None:
    assert on_ranks(program) == [PROGRAMS[program]] * 8


def test_the_variable_is_known(monkeypatch: Any) -> None:
    monkeypatch.setenv("FUSEDOPS_SHARED_MEMORY", "yes")
    assert env.shared_memory_disabled()
    assert any("FUSEDOPS_SHARED_MEMORY" in mistake for mistake in env.mistakes(["cpp"]))
