"""Ranks as threads compute what gloo processes do, and say what is wrong instead of hanging."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fusedops._core.collectives import all_gather_single
from fusedops.checkpoint import Checkpointer
from fusedops.parallel.comm import collectives
from fusedops.testing import RankError, threads
from fusedops.testing.processes import Processes

RANKS = 4


def mine(rank: int, *shape: int) -> torch.Tensor:
    """Small whole numbers, which any order of sums adds up exactly."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return numbers + 100 * rank


def room(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def everything(rank: int) -> dict[str, Any]:
    """Communicate in all ways over four ranks; returns what this one got."""
    warnings.simplefilter("ignore", FutureWarning)  # names that newer versions of torch replace
    size = dist.get_world_size()
    found: dict[str, Any] = {}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        given = mine(rank, 3)
        dist.all_reduce(given, getattr(dist.ReduceOp, op))
        found[f"all_reduce {op}"] = given
    given = mine(rank, 2)
    dist.reduce(given, 1)
    found["reduce"] = given if rank == 1 else None
    found["all_gather"] = parts = [room(2, 2) for _ in range(size)]
    dist.all_gather(parts, mine(rank, 2, 2))
    found["all_gather_single"] = whole = room(size * 2, 3)  # gloo takes no stacked output
    all_gather_single(whole, mine(rank, 2, 3))
    found["gather"] = into = [room(2) for _ in range(size)] if rank == 2 else None
    dist.gather(mine(rank, 2), into, 2)
    found["scatter"] = got = room(2)
    dist.scatter(got, [mine(each, 2) for each in range(size)] if rank == 3 else None, 3)
    found["reduce_scatter"] = got = room(2)
    dist.reduce_scatter(got, [mine(rank + each, 2) for each in range(size)])
    found["reduce_scatter_tensor"] = got = room(2, 3)
    dist.reduce_scatter_tensor(got, mine(rank, size * 2, 3))
    found["all_to_all"] = parts = [room(2) for _ in range(size)]
    sent = [mine(rank + index, 2) for index in range(size)]  # of one size: gloo takes no others
    dist.all_to_all(parts, sent)
    found["all_to_all_single"] = uneven = room(size * rank, 2)  # rank 0 gets nothing
    rows = mine(rank, sum(range(size)), 2)
    dist.all_to_all_single(uneven, rows, [rank] * size, list(range(size)))
    found["broadcast"] = given = mine(rank, 2)
    dist.broadcast(given, 2)
    found["objects"] = objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    found["send and receive"] = got = room(2)
    ring = [
        dist.P2POp(dist.isend, mine(rank, 2), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    found["functional"] = functional.all_gather_tensor(mine(rank, 2), 0, dist.group.WORLD) + 0
    return found


def models(rank: int) -> dict[str, Any]:
    """Use meshes, DTensor, DDP, FSDP2 and our own communications; returns what this rank got."""
    warnings.simplefilter("ignore", FutureWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {"place": mesh.get_coordinate()}
    spread = distribute_tensor(mine(0, 6, 4), mesh, [Shard(0), Shard(1)])
    found["shard"] = spread.to_local()
    found["whole"] = spread.full_tensor()
    found["replicated"] = spread.redistribute(mesh, [Replicate(), Shard(0)]).to_local()
    found["product"] = (spread @ spread.t()).full_tensor()
    found["partial"] = spread.sum().redistribute(mesh, [Replicate(), Replicate()]).to_local()
    assert Partial in {type(placement) for placement in spread.sum().placements}
    tp = mesh["tp"].get_group()
    with collectives.recorded() as log:
        found["ours"] = [
            collectives.all_reduce(mine(rank, 2), tp).wait(),
            collectives.all_gather(mine(rank, 2, 2), tp, dim=1).wait(),
            collectives.reduce_scatter(mine(rank, 2, 4), tp, dim=1).wait(),
            collectives.send_receive(
                mine(rank, 2), tp, to=1 - tp.rank(), source=1 - tp.rank()
            ).wait(),
        ]
    found["counts"] = log.counts()
    found["bytes"] = log.bytes()
    for name in ("FSDP2", "DDP"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
        if name == "FSDP2":
            for layer in model:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        model(mine(rank, 2, 4)).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        found[name] = [grad.full_tensor() if name == "FSDP2" else grad for grad in grads]
    torch.manual_seed(1)
    found["random"] = torch.rand(2)
    return found


def raises(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        raise KeyError("the one that failed")
    dist.all_reduce(torch.ones(2))


def all_raise(rank: int) -> None:
    dist.barrier()
    raise ValueError("it cannot be done")


def early(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a result before and after waiting for it."""
    given = torch.full((2,), float(rank))
    work = dist.all_reduce(given, async_op=True)
    before = given.clone()
    work.wait()
    return before, given


def reused(rank: int) -> torch.Tensor:
    """Write into what is being sent."""
    given, whole = torch.full((2,), float(rank)), torch.zeros(4)
    work = all_gather_single(whole, given, async_op=True)
    given.fill_(7.0)
    work.wait()
    return whole


def drawn(rank: int) -> list[float]:
    """Draw random numbers between communications: each rank has its own state."""
    torch.manual_seed(3)
    numbers = []
    for _ in range(3):
        numbers.append(float(torch.rand(())))
        dist.barrier()
        if rank == 1:
            torch.rand(5)  # what one rank draws is no other rank's
        torch.manual_seed(3 + len(numbers))
    return numbers


@pytest.mark.distributed
@pytest.mark.parametrize("function", [everything, models])
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
    "one raises": (raises, "KeyError: 'the one that failed'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_would_hang_or_corrupt_is_an_error_at_once(what: str) -> None:
    function, words = WRONG[what]
    with pytest.raises(RankError, match=words):
        threads.run(function, 2)
    assert threads.run(early, 2)[0][1].tolist() == [1.0, 1.0]  # the next run is well


def test_a_rank_that_is_no_cause_raises_nothing() -> None:
    with pytest.raises(RankError) as one:
        threads.run(raises, 2)
    with pytest.raises(RankError) as both:
        threads.run(all_raise, 2)
    assert set(one.value.errors) == {1}
    assert set(both.value.errors) == {0, 1}


def test_a_result_is_nan_until_it_is_waited_for() -> None:
    for before, after in threads.run(early, 2):
        assert all(math.isnan(each) for each in before.tolist())
        assert after.tolist() == [1.0, 1.0]


def test_what_is_sent_is_read_late() -> None:
    assert 7.0 in torch.stack(threads.run(reused, 2))


def test_each_rank_draws_its_own_random_numbers() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = threads.run(drawn, 2)
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_that_raises_is_told_and_others_take_its_place() -> None:
    with Processes(2) as pool:
        with pytest.raises(RankError, match="the one that failed"):
            pool.run(raises, 2, patience=10.0)
        assert [each.tolist() for _, each in pool.run(early, 2)] == [[1.0, 1.0]] * 2


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
