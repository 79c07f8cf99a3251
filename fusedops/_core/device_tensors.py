"""Tensors of the host on a device, without a wait of the host."""

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
    if torch.compiler.is_compiling():  # the compiler makes a constant of it
        return torch.tensor(values, dtype=dtype, device=device)
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), torch.device(device))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on ``device``, for a GPU by way of pinned memory."""
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
