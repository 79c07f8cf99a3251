"""Two gloo processes for the distributed tests of this folder, from the pool of tests/parallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

RANKS = 2


@pytest.fixture(scope="session")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    pools: list[Any] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def on_two_ranks(
    _pair: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """``on_two_ranks(function, *args)`` calls ``function(world, *args)`` on two ranks."""
    from process_pool import Pool

    if not _pair or not _pair[-1].alive:
        _pair.append(Pool(tmp_path_factory.mktemp("ranks"), RANKS))
    return _pair[-1].run
