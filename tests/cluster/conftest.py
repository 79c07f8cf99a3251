"""Where the tests of this folder run: on NCCL with two GPUs or more, else on gloo and the CPU.

The same tests run in both. On the CPU they are a rehearsal: it finds mistakes in the tests and in
what does not depend on the device, and says nothing about NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

SIZES = (2, 4)
GPUS = torch.cuda.device_count()
IS_REHEARSAL = min(SIZES) > GPUS or os.environ.get("FUSEDOPS_CLUSTER_REHEARSAL") == "1"
DEVICE = "cpu" if IS_REHEARSAL else "cuda"
MARK = pytest.mark.ci if IS_REHEARSAL else pytest.mark.gpu


def pytest_report_header() -> str:
    backend = (
        "gloo on the CPU: a rehearsal, NCCL needs two GPUs" if IS_REHEARSAL else "NCCL on GPUs"
    )
    return f"cluster: torch sees {GPUS} GPUs; tests of ranks run with {backend}"


@dataclass(frozen=True)
class Cluster:
    """Ranks on one kind of device, which run functions of tests."""

    device: str
    ranks: int
    pool: Any

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(device, *args)`` on every rank; return the results by rank."""
        from run_ranks import without_rank

        return self.pool.run(without_rank, self.ranks, function, self.device, *args)

    def layout(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a layout of two ranks with as many replicas as there are ranks for."""
        return values | {"dp": values.get("dp", 1) * self.ranks // 2}


@pytest.fixture(scope="module")
def _cluster_pool() -> Iterator[Any]:
    from run_ranks import Pool  # whose imports need packages that may not be installed

    with Pool(max(SIZES) if IS_REHEARSAL else min(GPUS, max(SIZES)), DEVICE) as pool:
        yield pool


@pytest.fixture(params=[pytest.param(size, marks=MARK, id=f"{DEVICE}-{size}") for size in SIZES])
def cluster(request: pytest.FixtureRequest, _cluster_pool: Any) -> Cluster:
    """Two ranks; and four, where there is a device for each."""
    if not IS_REHEARSAL and request.param > GPUS:
        pytest.skip(f"needs {request.param} GPUs, torch sees {GPUS}")
    return Cluster(DEVICE, request.param, _cluster_pool)


@pytest.fixture(params=[pytest.param(DEVICE, marks=MARK)])
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device, for tests that start two processes themselves."""
    return request.param
