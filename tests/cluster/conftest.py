"""Where the tests of this folder run: on NCCL with two GPUs or more, else on gloo and the CPU.

The same tests run in both. On the CPU they are a rehearsal: it finds mistakes in the tests and in
what does not depend on the device, and says nothing about NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from cluster_ranks import Cluster

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


@pytest.fixture(scope="module")
def _pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    from process_pool import Pool  # whose imports need packages that may not be installed

    pools = {size: Pool(tmp_path_factory.mktemp("ranks"), size, DEVICE) for size in SIZES}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=[pytest.param(size, marks=MARK, id=f"{DEVICE}-{size}") for size in SIZES])
def cluster(request: pytest.FixtureRequest, _pools: dict[int, Any]) -> Cluster:
    """Two ranks; and four, where there is a device for each."""
    from cluster_ranks import Cluster

    if not IS_REHEARSAL and request.param > GPUS:
        pytest.skip(f"needs {request.param} GPUs, torch sees {GPUS}")
    return Cluster(DEVICE, request.param, _pools[request.param])


@pytest.fixture(params=[pytest.param(DEVICE, marks=MARK)])
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device, for tests that start two processes themselves."""
    return request.param
