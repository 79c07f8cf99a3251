"""Kernels of operators that communicate: Python that torch calls below its modes.

A stand-in for a device (``fusedops.testing``) replaces ``run`` while it acts, and calls the kernel
with its modes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def run(kernel: Callable[..., Any], *args: Any) -> Any:
    """Call a kernel."""
    return kernel(*args)


def replaceable(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that is called by what ``run`` is at that time."""

    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        return run(kernel, *args)

    return call
