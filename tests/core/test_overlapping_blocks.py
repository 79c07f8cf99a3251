"""Blocks of ``use_backend`` that overlap: nothing remains of any of them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import backends


def runs_on() -> str:
    fusedops.reset_counters()
    fusedops.layer_norm(torch.ones(4, 8), (8,))
    ((_, backend),) = fusedops.counters()
    return backend


def open_and_close(seed: int, *, alone: bool = False) -> None:
    """Open blocks and close them in any order."""
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


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_block_that_is_open_counts(seed: int) -> None:
    """Alone, and where several threads do so at once."""
    before, usual = list(backends._requests), runs_on()
    open_and_close(seed, alone=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_and_close, range(seed, seed + 4)))
    assert backends._requests == before
    assert runs_on() == usual
