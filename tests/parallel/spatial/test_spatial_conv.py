"""Convolutions of cut tensors equal one process in float64: a seeded sweep."""

from __future__ import annotations

import random

import pytest
from spatial_cases import MESHES, draw, run_cases

from fusedops.testing import threads


def sweep(ranks: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    threads.run(run_cases, ranks, [draw(rng, ranks) for _ in range(count)])


@pytest.mark.parametrize("ranks", MESHES)
def test_convolutions_equal_one_process(ranks: int) -> None:
    sweep(ranks, 40, seed=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", MESHES)
def test_many_convolutions_equal_one_process(ranks: int, seed: int) -> None:
    sweep(ranks, 150, seed=1000 + 10 * ranks + seed)
