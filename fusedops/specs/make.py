"""Random inputs for specs: reproducible, the same for every device and dtype."""

from __future__ import annotations

import zlib

import torch


def randn(
    *shape: int,
    device: torch.device,
    dtype: torch.dtype,
    scale: float = 1.0,
    shift: float = 0.0,
    grad: bool = True,
    key: str = "",
) -> torch.Tensor:
    """Return normal values, drawn in float32 on the CPU from a seed made of shape and ``key``."""
    seed = zlib.crc32(f"{shape}{key}".encode())
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * scale + shift
    return values.to(device=device, dtype=dtype).requires_grad_(grad)


def common_offset(dtype: torch.dtype) -> float:
    """Return what all values of a row may have in common: 1e6, or what ``dtype`` can hold."""
    return min(1e6, torch.finfo(dtype).max / 4)


def randint(*shape: int, high: int, device: torch.device, key: str = "") -> torch.Tensor:
    """Return int64 values in [0, high), drawn on the CPU from a seed of shape and ``key``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape}{high}{key}".encode()))
    return torch.randint(high, shape, generator=generator).to(device)
