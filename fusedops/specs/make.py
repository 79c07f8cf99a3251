"""Random inputs for specs: reproducible, the same for every device and dtype."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedops._core import dtypes


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


@dataclass(frozen=True)
class TensorFactory:
    """``randn`` for tensors on a device and of a dtype."""

    device: torch.device
    dtype: torch.dtype
    grad: bool = True

    def __call__(self, *shape: int, **options: Any) -> torch.Tensor:
        """Return ``randn(*shape)``."""
        return randn(*shape, **vars(self) | options)

    def integers(self, *shape: int, high: int, key: str = "") -> torch.Tensor:
        """Return ``randint(*shape)``."""
        return randint(*shape, high=high, device=self.device, key=key)

    @property
    def place(self) -> dict[str, Any]:
        """``device`` and ``dtype``, for a call by keywords."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def wide(self) -> TensorFactory:
        """The same with float32 for half precision."""
        return replace(self, dtype=dtypes.statistics_dtype(self.dtype))


def common_offset(dtype: torch.dtype) -> float:
    """Return what all values of a row may have in common: 1e6, or what ``dtype`` can hold.

    Of float64 it is 1e3: the truth is float64 too, and rounds what it is given.
    """
    return 1e3 if dtype == torch.float64 else min(1e6, torch.finfo(dtype).max / 4)


# Where exponentials of float32 underflow, overflow or saturate; exact in every dtype.
_EXTREMES = (-110.0, -90.0, -60.0, 60.0, 90.0, 110.0)


def with_extremes(values: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Return the values with extreme ones among them, ``scale`` times -110 to 110.

    Of a matrix the first row has the lowest two alone, the second the highest two, others one of
    all six among ordinary values. A vector has all of them, by turns.
    """
    rows = values.detach().clone().reshape(-1, values.shape[-1])
    extremes = scale * torch.tensor(_EXTREMES, dtype=rows.dtype, device=rows.device)
    columns = torch.arange(rows.shape[1], device=rows.device)
    if values.dim() == 1:
        rows[0] = extremes[columns % 6]
    else:
        rows[0], rows[1] = extremes[columns % 2], extremes[columns % 2 + 4]
        for number, row in enumerate(rows[2:]):
            row[number % len(row)] = extremes[number % 6]
    return rows.view(values.shape).requires_grad_(values.requires_grad)


def randint(*shape: int, high: int, device: torch.device, key: str = "") -> torch.Tensor:
    """Return int64 values in [0, high), drawn on the CPU from a seed of shape and ``key``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape}{high}{key}".encode()))
    return torch.randint(high, shape, generator=generator).to(device)
