"""The patch for a model that a trainer will give to DeepSpeed, or not."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fusedops.integrations.hf.patch import patch
from fusedops.integrations.hf.report import PatchReport


def patch_for(deepspeed: bool) -> Callable[..., PatchReport]:
    """Return ``fusedops.patch``, or the one of ``fusedops.integrations.deepspeed``."""
    if not deepspeed:
        return patch
    chosen: Callable[..., PatchReport] = importlib.import_module(
        "fusedops.integrations.deepspeed"
    ).patch
    return chosen
