"""Shared by all tests: where they run, what they need, and Triton's interpreter made strict.

A machine with a GPU may have torch, Triton, NumPy and pytest, and nothing more: a file of tests
whose imports need another package is skipped there, by name, and does not end the collection.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import unmeasured_guards

from fusedops._core import backends, env
from fusedops._core.generators import seed_generators
from fusedops.integrations.hf.rules import rule, torch_modules
from fusedops.specs import all_specs

# What tests use beside those four. expecttest: torch's own lists of samples need it.
OPTIONAL = (
    "accelerate",
    "click",
    "expecttest",
    "hypothesis",
    "matplotlib",
    "psutil",
    "rich",
    "tokenizers",
    "transformers",
    "typer",
)

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_configure(config: pytest.Config) -> None:
    if env.triton_interpreted():
        import triton_interpreter_strict  # noqa: F401


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class _Module(pytest.Module):
    """A file of tests that is skipped where a package that it imports is not installed."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except SystemExit:  # of the command, which says in one line that typer is missing
            if _installed("typer"):
                raise
            pytest.skip("typer is not installed", allow_module_level=True)
        except self.CollectError as error:
            cause = error.__cause__
            missing = [name for name in OPTIONAL if not _installed(name)]
            ours = isinstance(cause, ImportError) and (cause.name or "").startswith("fusedops")
            if not missing or not isinstance(cause, ImportError) or ours:
                raise
            pytest.skip(f"{cause} (not installed: {', '.join(missing)})", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here; in Triton's interpreter only the tests marked for it can."""
    _leave_every_nth(items)
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    no_interpreter = pytest.mark.skip(reason="needs TRITON_INTERPRET=1, in its own process")
    only_interpreter = pytest.mark.skip(reason="TRITON_INTERPRET=1 is set: only its own tests run")
    no_kernel = pytest.mark.skip(reason="a GPU computes this op by its reference")
    no_kernels = [name for name in all_specs() if backends._KERNELS[name].triton is None]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter"):
            if not _names_the_interpreter(item.path):
                raise pytest.UsageError(
                    f"{item.path}: write mark.interpreter, see INTERPRETED in Makefile"
                )
            if not env.triton_interpreted():
                item.add_marker(no_interpreter)
            elif any(name in item.nodeid for name in no_kernels):
                item.add_marker(no_kernel)
        elif env.triton_interpreted():
            item.add_marker(only_interpreter)


def _leave_every_nth(items: list[pytest.Item]) -> None:
    """Mark all tests of a function marked ``ci(every=n)`` as slow, except every n-th."""
    seen: Counter[str] = Counter()
    for item in items:
        every = next((m.kwargs["every"] for m in item.iter_markers("ci") if m.kwargs), 1)
        function = item.nodeid.partition("[")[0]
        if every > 1 and seen[function] % every:
            item.add_marker(pytest.mark.slow)
        seen[function] += every > 1


@functools.cache
def _names_the_interpreter(path: Path) -> bool:
    return "mark.interpreter" in path.read_text()


@pytest.fixture(scope="session")
def _pool() -> Iterator[Any]:
    from run_ranks import Pool

    with Pool() as pool:
        yield pool


@pytest.fixture
def on_processes(_pool: Any) -> Callable[..., list[Any]]:
    """``on_processes(function, size, *args)`` calls ``function(rank, *args)`` on a new world."""
    return _pool.run


@pytest.fixture
def on_ranks(_pool: Any) -> Callable[..., list[Any]]:
    """``on_ranks(function, *args)`` calls ``function(world, *args)`` on eight ranks."""
    return _on_worlds(_pool, 8)


@pytest.fixture
def on_two_ranks(_pool: Any) -> Callable[..., list[Any]]:
    """``on_two_ranks(function, *args)`` calls ``function(world, *args)`` on two ranks."""
    return _on_worlds(_pool, 2)


def _on_worlds(pool: Any, size: int) -> Callable[..., list[Any]]:
    from run_ranks import with_world

    return functools.partial(pool.run, with_world, size)


def pytest_collection_finish() -> None:
    _keep()


def pytest_runtest_setup() -> None:
    unmeasured_guards.install()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield  # fixtures of the file have ended
    if nextitem is None or nextitem.path != item.path:
        _keep()


def _keep() -> None:
    """Keep what is there, modules above all, from later garbage collections.

    Hundreds of tests ask for one, and each would look at all that earlier files have imported.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    seed_generators(0)
    if env.triton_interpreted():
        import triton_interpreter_strict

        triton_interpreter_strict.restart()


# Tests of these folders that need the own products ask for them.
_SHIPPED_DISPATCH = ("integrations", "clients")


@pytest.fixture
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let patched linear layers of all dtypes be fused: in float32 the processor decides."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    monkeypatch.setattr(torch_modules, "_SERVED", dtypes)


@pytest.fixture(autouse=True)
def fused_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let patched modules fuse the small tensors of tests on every processor."""
    monkeypatch.setattr(rule, "TORCH_MULTIPLIES_FLOAT32", False)


@pytest.fixture(autouse=True)
def own_products_elsewhere(request: pytest.FixtureRequest) -> None:
    if request.path.parent.name not in _SHIPPED_DISPATCH:
        request.getfixturevalue("own_products")
