"""Drawn programs of collectives: through shared memory they give what gloo gives, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from test_shared import needs_channel
from torch import distributed as dist

from fusedops.parallel.comm import collectives
from fusedops.runtime import shared_memory

pytestmark = [pytest.mark.distributed, needs_channel]
OnProcesses = Callable[..., list[Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "unequal all_to_all",
    "shift",
)
LARGE = 1_500_000  # elements: four of them are more than a ring holds
TIMEOUT = timedelta(seconds=40)


@dataclass(frozen=True)
class Step:
    """A collective of a program; ``group`` is an index, ``root`` its source or distance."""

    kind: str
    group: int
    rows: int  # of each rank's part
    dtype: torch.dtype
    op: str
    root: int
    barrier: bool


def _drawn(seed: int, sizes: list[int], length: int) -> list[Step]:
    drawn = random.Random(seed)
    steps = []
    for _ in range(length):
        group = drawn.randrange(len(sizes))
        large = LARGE // sizes[group] if drawn.random() < 0.3 else 500
        steps.append(
            Step(
                drawn.choice(KINDS),
                group,
                drawn.choice((0, 1, drawn.randrange(large))),
                drawn.choice(DTYPES),
                drawn.choice(("sum", "sum", "max", "min", "product")),
                drawn.randrange(1, sizes[group]),
                drawn.random() < 0.2,
            )
        )
    return steps


def _given(step: Step, rank: int, ranks: int, number: int) -> torch.Tensor:
    """What a rank gives: small integers, whose sums are exact in every dtype."""
    values = torch.arange(2 * step.rows * ranks) + 7 * rank + number
    tensor = values.remainder(3).to(step.dtype).view(-1, 2)
    if (rank + number) % 3 == 0:  # the same numbers with other strides
        return tensor.t().contiguous().t()
    return tensor


def _started(
    step: Step, group: dist.ProcessGroup, number: int, dtype: torch.dtype | None = None
) -> collectives.Pending:
    rank, ranks = group.rank(), group.size()
    mine = _given(step, rank, ranks, number).to(dtype or step.dtype)
    if step.kind == "all_reduce":
        return collectives.all_reduce(mine, group, op=step.op)
    if step.kind == "all_gather":
        return collectives.all_gather(mine, group, dim=number % 2)
    if step.kind == "reduce_scatter":
        return collectives.reduce_scatter(mine, group)
    if step.kind == "broadcast":
        return collectives.broadcast(mine, group, source=step.root)
    if step.kind == "all_to_all":
        return collectives.all_to_all(mine, group)
    if step.kind == "shift":
        return collectives.shift(mine, group, by=step.root)
    send = [(rank + peer) % 3 * step.rows // 3 for peer in range(ranks)]  # symmetric
    return collectives.all_to_all(mine[: sum(send)], group, send=send, receive=send)


def _run(
    steps: list[Step], groups: list[Any], world_group: dist.ProcessGroup, draws: random.Random
) -> list[torch.Tensor]:
    """Start the steps in order and wait for them in an order of this rank."""
    results: dict[int, torch.Tensor] = {}
    pending: dict[int, collectives.Pending] = {}
    for number, step in enumerate(steps):
        if groups[step.group] is not None:
            pending[number] = _started(step, groups[step.group], number)
        while pending and draws.random() < 0.3:
            chosen = draws.choice(list(pending))
            results[chosen] = pending.pop(chosen).wait()
        if step.barrier:
            dist.barrier(world_group)
    for number in draws.sample(list(pending), len(pending)):
        results[number] = pending[number].wait()
    return [results[number] for number in sorted(results)]


def _made_groups(ranks: int) -> list[Any]:
    members = [list(range(ranks)), list(range(ranks)), list(range(ranks - 2, ranks))]
    groups = [dist.new_group(member, timeout=TIMEOUT) for member in members]
    return [None if group is dist.GroupMember.NON_GROUP_MEMBER else group for group in groups]


def _compared(rank: int, ranks: int, seed: int) -> list[int]:
    """Return the steps whose result is another than gloo's."""
    shared, sockets = _made_groups(ranks), _made_groups(ranks)
    world, steps = dist.group.WORLD, _drawn(seed, [ranks, ranks, 2], 24)
    order = random.Random(1000 * seed + rank)
    found = _run(steps, shared, world, order)
    with mock.patch.dict("os.environ", {"FUSEDOPS_SHARED_MEMORY": "0"}):
        wanted = _run(steps, sockets, world, order)
    assert all(group is None or shared_memory._channels.get(group) for group in shared)
    assert not any(shared_memory._channels.get(group) for group in sockets if group is not None)
    pairs = zip(found, wanted, strict=True)
    return [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5)])
def test_drawn_programs_equal_gloo(on_processes: OnProcesses, ranks: int, seed: int) -> None:
    assert on_processes(_compared, ranks, ranks, seed) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_many_drawn_programs_equal_gloo(on_processes: OnProcesses, seed: int) -> None:
    ranks = 2 + seed % 5
    assert on_processes(_compared, ranks, ranks, seed) == [[]] * ranks


PLAIN = Step("all_reduce", 0, 50, torch.float32, "sum", 1, False)
DISAGREEMENTS = {
    "size": replace(PLAIN, rows=100),
    "no elements": replace(PLAIN, rows=0),
    "more than the ring": replace(PLAIN, rows=LARGE),
    "dtype": replace(PLAIN, dtype=torch.bfloat16),
    "dtype that is gathered": replace(PLAIN, dtype=torch.int64),
    "op": replace(PLAIN, op="max"),
    "all_gather": replace(PLAIN, kind="all_gather"),
    "reduce_scatter": replace(PLAIN, kind="reduce_scatter"),
    "broadcast": replace(PLAIN, kind="broadcast"),
    "all_to_all": replace(PLAIN, kind="all_to_all"),
    "shift": replace(PLAIN, kind="shift"),
}


def _disagree(
    rank: int, ranks: int, common: Step, other: Step, order: str
) -> tuple[float, list[str]]:
    """Return a good sum, and the errors of a collective about which the last rank disagrees."""
    group = dist.new_group(list(range(ranks)), timeout=TIMEOUT)
    good = float(collectives.all_reduce(torch.ones(1), group).wait())
    step = other if rank == ranks - 1 else common
    steps = [PLAIN, step, PLAIN] if order == "between" else [step, PLAIN]
    errors = []
    try:
        pending = [_started(each, group, number) for number, each in enumerate(steps)]
        for each in reversed(pending):
            each.wait()
    except ValueError as error:
        errors.append(str(error))
    try:
        collectives.all_reduce(torch.ones(1), group).wait()
    except ValueError as error:
        errors.append(str(error))
    return good, errors


def _assert_all_ranks_raise(
    on_processes: OnProcesses, ranks: int, common: Step, other: Step, order: str
) -> None:
    for good, errors in on_processes(_disagree, ranks, ranks, common, other, order):
        assert good == ranks
        assert len(errors) == 2, errors
        for error in errors:
            assert "disagree about its collective" in error
            assert f"rank {ranks - 1} called" in error
            assert any(f"rank {index} called" in error for index in range(ranks - 1))


@pytest.mark.parametrize("what", list(DISAGREEMENTS))
def test_disagreement_is_an_error_of_all_ranks(on_processes: OnProcesses, what: str) -> None:
    ranks, order = {0: (2, "first"), 1: (4, "between"), 2: (8, "between")}[len(what) % 3]
    _assert_all_ranks_raise(on_processes, ranks, PLAIN, DISAGREEMENTS[what], order)


@pytest.mark.parametrize("kind", ["broadcast", "shift"])
def test_disagreement_about_a_root(on_processes: OnProcesses, kind: str) -> None:
    common = replace(PLAIN, kind=kind)
    _assert_all_ranks_raise(on_processes, 4, common, replace(common, root=2), "first")


def _blocks_elsewhere(rank: int, ranks: int, how: str) -> float:
    """Rank 0 waits at once; the others first block in something that rank 0 does afterwards."""
    members = list(range(ranks))
    groups = [dist.new_group(members, timeout=TIMEOUT) for _ in range(2)]
    store = dist.distributed_c10d._get_default_store()
    key = f"{how} {ranks} {groups[0].group_name}"
    tensors = [torch.full((LARGE,), float(rank)) for _ in range(4)]
    pending = [collectives.all_reduce(tensor, groups[0]) for tensor in tensors]
    others = [collectives.all_reduce(torch.ones(LARGE), groups[1]) for _ in range(4)]

    def wait() -> None:
        for each in pending:
            each.wait()

    def meet() -> None:
        if how == "barrier":
            dist.barrier(groups[0])
        elif how == "receive":
            if rank == 0:
                for peer in members[1:]:
                    dist.send(torch.ones(1), group=groups[0], group_dst=peer)
            else:
                dist.recv(torch.ones(1), group=groups[0], group_src=0)
        elif how == "store":
            if rank == 0:
                store.set(key, "1")
            else:
                store.wait([key], TIMEOUT)
        else:  # "other group": whose sums the ranks wait for in another order
            for each in others:
                each.wait()

    for each in (wait, meet) if rank == 0 else (meet, wait):
        each()
    if how != "other group":
        for other in others:
            other.wait()
    return float(sum(each[-1] for each in tensors))


@pytest.mark.parametrize("how", ["barrier", "receive", "store", "other group"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_no_wait_depends_on_what_another_rank_blocks_in(
    on_processes: OnProcesses, ranks: int, how: str
) -> None:
    total = 4.0 * sum(range(ranks))
    assert on_processes(_blocks_elsewhere, ranks, ranks, how) == [total] * ranks
