"""Buffers that keep their dtype when a module's parameters get another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def apply_but_keep_dtype(module: torch.nn.Module, name: str, apply: Callable[[], Any]) -> None:
    """Run ``nn.Module._apply`` and give a buffer, where there is one, the dtype that it had."""
    before = getattr(module, name)
    apply()
    after = getattr(module, name)
    if before is None or after.dtype == before.dtype:
        return
    # From the numbers before the cast, unless there were none, or are none any more.
    source = after if before.is_meta or after.is_meta else before
    setattr(module, name, source.to(after.device, before.dtype))
