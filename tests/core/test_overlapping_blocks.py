"""Blocks of ``use_backend`` that overlap: nothing remains of any of them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import backends


def state() -> tuple[Any, ...]:
    return tuple(backends._requests)


def runs_on() -> str:
    fusedops.reset_counters()
    fusedops.layer_norm(torch.ones(4, 8), (8,))
    ((_, backend),) = fusedops.counters()
    return backend


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    before, usual = state(), runs_on()
    yield
    assert state() == before
    assert runs_on() == usual


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_block_that_is_open_counts(seed: int) -> None:
    """Blocks begin and end in any order; several threads do so at once."""

    def work(seed: int, *, alone: bool = False) -> None:
        draw = random.Random(seed)
        opened: list[tuple[str, Any]] = []
        for step in range(12):
            if opened and (step >= 6 or draw.random() < 0.4):
                opened.pop(draw.randrange(len(opened)))[1].__exit__(None, None, None)
            elif step < 6:
                name = draw.choice(["torch", "cpp"])
                opened.append((name, fusedops.use_backend(name)))
                opened[-1][1].__enter__()
            assert not alone or backends.requested() == (opened[-1][0] if opened else None)
        for _, block in opened:
            block.__exit__(None, None, None)

    work(seed, alone=True)
    run_all([lambda each=each: work(each) for each in range(seed, seed + 4)])


def test_generators_that_are_dropped_leave_nothing() -> None:
    def generate(name: str) -> Iterator[None]:
        with fusedops.use_backend(name):
            yield

    first, second = generate("torch"), generate("cpp")
    next(first)
    next(second)
    del first
    assert backends.requested() == "cpp"
    del second
    assert backends.requested() is None


def test_tasks_that_take_turns() -> None:
    async def work(name: str, steps: int) -> None:
        with fusedops.use_backend(name):
            for _ in range(steps):
                await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*(work("torch", steps) for steps in (1, 5, 2, 4, 3)))

    asyncio.run(all_of_them())


def test_threads_that_take_turns() -> None:
    inside = threading.Barrier(2, timeout=60)
    left = threading.Event()
    seen = []

    def first() -> None:
        with fusedops.use_backend("torch"):
            inside.wait()
            inside.wait()
        left.set()

    def second() -> None:
        inside.wait()
        with fusedops.use_backend("cpp"):
            inside.wait()
            assert left.wait(60)
            seen.append(runs_on())

    run_all([first, second])
    assert seen == ["cpp"]


def run_all(functions: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
