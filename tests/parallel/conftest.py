"""One pool of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from process_pool import Pool


@pytest.fixture(scope="session")
def _pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def on_ranks(
    _pools: list[Pool], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """``on_ranks(function, *args)`` calls ``function(world, *args)`` on eight ranks."""
    if not _pools or not _pools[-1].alive:
        _pools.append(Pool(tmp_path_factory.mktemp("ranks")))
    return _pools[-1].run
