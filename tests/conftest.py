"""Shared by all tests: where they run, and Triton's interpreter made right and strict."""

from __future__ import annotations

import pytest
import torch

from fusedops._core import env

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_configure(config: pytest.Config) -> None:
    if env.triton_interpreted():
        import triton_interpreter_bf16  # noqa: F401
        import triton_interpreter_strict  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here; in Triton's interpreter only the tests marked for it can."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    no_interpreter = pytest.mark.skip(reason="needs TRITON_INTERPRET=1, in its own process")
    only_interpreter = pytest.mark.skip(reason="TRITON_INTERPRET=1 is set: only its own tests run")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter"):
            if not env.triton_interpreted():
                item.add_marker(no_interpreter)
        elif env.triton_interpreted():
            item.add_marker(only_interpreter)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    if env.triton_interpreted():
        import triton_interpreter_strict

        triton_interpreter_strict.restart()
