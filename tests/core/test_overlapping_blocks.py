"""Blocks of ``use_backend`` that overlap: nothing remains of any of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def run_all(functions: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for started in [pool.submit(function) for function in functions]:
            started.result()
