"""Tensors of Python numbers on a device, without a wait of the host."""

from __future__ import annotations

from typing import Any

import torch


def device_tensor(values: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return ``torch.tensor(values, dtype=dtype)`` on ``device``.

    ``torch.tensor(values, device="cuda")`` copies from pageable memory: the host waits until the
    stream has done all work before the copy. From pinned memory it does not.

    Args:
        values: numbers, as of ``torch.tensor``.
        dtype: of the result.
        device: of the result.
    """
    device = torch.device(device)
    numbers = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)
