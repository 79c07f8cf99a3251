"""Every environment variable that fusedops reads, with its meaning. Nothing else reads them.

| variable | meaning | default |
|---|---|---|
| ``FUSEDOPS_BACKEND`` | backend to use for every op, as ``fusedops.use_backend`` | automatic |
| ``FUSEDOPS_LIBRARY`` | folder that holds the compiled libraries | ``fusedops/lib`` |
| ``FUSEDOPS_DISABLE_NATIVE`` | ``1``: do not load the compiled libraries | ``0`` |
| ``FUSEDOPS_TUNING`` | tuning table that wins over the shipped one; ``off``: no table | shipped |
| ``THP_MEM_ALLOC_ENABLE`` | torch's: ``1`` asks for huge pages (``tune_host`` sets it) | ``0`` |
| ``TRITON_INTERPRET`` | Triton's own: ``1`` interprets its kernels, on CPU tensors too | ``0`` |
"""

from __future__ import annotations

import os
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def backend() -> str | None:
    """Return the backend that ``FUSEDOPS_BACKEND`` asks for, or ``None``."""
    return os.environ.get("FUSEDOPS_BACKEND") or None


def library_folder() -> Path:
    """Return the folder of the compiled libraries."""
    chosen = os.environ.get("FUSEDOPS_LIBRARY")
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / "lib"


def native_disabled() -> bool:
    """Return whether the compiled libraries must not be loaded."""
    return os.environ.get("FUSEDOPS_DISABLE_NATIVE", "0") == "1"


def tuning() -> str | None:
    """Return what ``FUSEDOPS_TUNING`` is set to (a path or ``"off"``), or ``None``."""
    return os.environ.get("FUSEDOPS_TUNING") or None


def triton_interpreted() -> bool:
    """Return whether Triton runs its kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def set_huge_pages() -> bool:
    """Set ``THP_MEM_ALLOC_ENABLE`` to ``1`` unless it is set; return whether this set it."""
    if HUGE_PAGES in os.environ:
        return False
    os.environ[HUGE_PAGES] = "1"
    return True


def unset_huge_pages() -> None:
    """Take back what ``set_huge_pages`` set."""
    del os.environ[HUGE_PAGES]
