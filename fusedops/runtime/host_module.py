"""Loads the Python module of ``csrc/host``: code that needs no torch."""

from __future__ import annotations

import functools
import importlib.util
from importlib.machinery import ExtensionFileLoader
from typing import Any

from fusedops._core import extension


@functools.cache
def load() -> Any:
    """Return the module, or the reason why it is not there as a string."""
    reason = extension.cpu_library()
    if reason is not None:
        return reason
    path = extension.library_path("libfusedops_host.abi3.so")
    if not path.exists():
        return f"{path} does not exist: {extension.HOW_TO_BUILD}; it needs the headers of Python"
    loader = ExtensionFileLoader("host", str(path))
    spec = importlib.util.spec_from_file_location("host", path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return f"{path} does not load ({error}): {extension.HOW_TO_BUILD}"
    return module
