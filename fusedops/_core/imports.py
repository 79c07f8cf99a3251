"""Imports: what waits for somebody else's, what names a package, and what makes ours faster."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator
from typing import Any


def after(module: str, call: Callable[[], None]) -> None:
    """Call once: now, if ``module`` is there, else right after somebody has imported it."""
    if module in sys.modules:
        call()
    elif not any(
        isinstance(finder, _AfterImport) and (finder.module, finder.call) == (module, call)
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _AfterImport(module, call))


def needed(module: str, package: str, by: str) -> Any:
    """Import a module of another project, which pip calls ``package``, for ``by``, a part of ours.

    Raises:
        ImportError: the project is not installed. An error inside of it stays what it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        message = f"{by} needs {module}, which is not installed: pip install {package}"
        raise ImportError(message, name=error.name) from error


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls right after a module has been imported, once.

    A lookup need not be followed by an import, and an import may fail: only one that succeeds takes
    the finder away.
    """

    def __init__(self, module: str, call: Callable[[], None]) -> None:
        self.module = module
        self.call = call

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.call()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let no garbage collection run inside the block.

    The registration of the ops allocates enough to start a collection of everything that torch has
    made before: half the time of `import fusedops` (0.09 instead of 0.20 s of a busy EPYC core).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
