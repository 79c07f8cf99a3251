"""Which Triton compiles the kernels: where one tile cannot serve all versions, it decides.

The choices stand beside the tables that they change: ``grep TRITON fusedops/kernels``. The static
report (``tools/kernel_report.py``) reads the tables as another version would.
"""

from __future__ import annotations

import triton

TRITON: tuple[int, int] = tuple(int(part) for part in triton.__version__.split(".")[:2])  # type: ignore[assignment]


def at_least(major: int, minor: int) -> bool:
    """Return whether the kernels are compiled by this version or a later one."""
    return (major, minor) <= TRITON
