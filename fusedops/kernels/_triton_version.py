"""The version of Triton that compiles the kernels: some tile sizes depend on it.

The choices are next to the tables that they change: ``grep at_least fusedops/kernels``. The static
report (``tools/kernel_report.py``) reads the tables as another version would.
"""

from __future__ import annotations

import triton

TRITON: tuple[int, int] = tuple(int(part) for part in triton.__version__.split(".")[:2])  # type: ignore[assignment]


def at_least(major: int, minor: int) -> bool:
    return (major, minor) <= TRITON
