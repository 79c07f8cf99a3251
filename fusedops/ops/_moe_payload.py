"""The bytes of one packed row of an expert-parallel exchange: the only place that knows them.

    | row: H elements, or H bytes of float8 | pad to 8 | probs | ids: int32 | scale? | pad to 16 |

A row starts at a multiple of 16 bytes, so that a receiver reads row, probabilities and ids in
place, as strided views. With float8 (e4m3) a row has a scale of its own, a power of two:
multiplying by it never rounds, so every backend makes the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedops._core.tracing import plain_sizes

_SCALE_BYTES = 4
_LARGEST = 448.0  # of e4m3
_MANTISSA_OF_LARGEST = 0x600000  # 448 = 1.75 * 2**8
_EXPONENT_OF_LARGEST = 8


@dataclass(frozen=True)
class PayloadLayout:
    """Where the parts of a packed row stand, in bytes."""

    hidden_size: int  # elements of a row
    dtype: torch.dtype  # of the row before packing
    prob_dtype: torch.dtype  # float32, or float64 for a float64 router
    pairs: int  # probabilities, and expert ids, per row
    quantized: bool = False  # whether the row travels as float8 with a scale

    @property
    def data_bytes(self) -> int:
        return self.hidden_size * (1 if self.quantized else self.dtype.itemsize)

    @property
    def probs_at(self) -> int:
        return _aligned(self.data_bytes, 8)

    @property
    def ids_at(self) -> int:
        return self.probs_at + self.pairs * self.prob_dtype.itemsize

    @property
    def scale_at(self) -> int:
        return self.ids_at + self.pairs * 4

    @property
    def stride(self) -> int:
        return _aligned(self.scale_at + _SCALE_BYTES * self.quantized, 16)

    @property
    def offsets(self) -> list[int]:
        """What the kernels need: ``[probs_at, ids_at, scale_at, stride]``."""
        return plain_sizes([self.probs_at, self.ids_at, self.scale_at, self.stride])

    def rows(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[:, : self.data_bytes].view(self.dtype)

    def probs(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[:, self.probs_at : self.ids_at].view(self.prob_dtype)

    def ids(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[:, self.ids_at : self.scale_at].view(torch.int32)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(bytes, scales)``: uint8 ``[rows, H]``, float32 ``[rows, 1]``.

    The scale is the smallest power of two that brings the row's largest finite value to 448 or
    below. Infinities become NaN: e4m3 has none.
    """
    values = rows.float()
    finite = torch.where(values.isfinite(), values.abs(), 0.0)
    largest = finite.amax(dim=1, keepdim=True).view(torch.int32)
    exponent = (largest >> 23) - 127 - _EXPONENT_OF_LARGEST
    exponent = exponent + ((largest & 0x7FFFFF) > _MANTISSA_OF_LARGEST).to(torch.int32)
    exponent = exponent.clamp_min(-126)
    scaled = values * ((127 - exponent) << 23).view(torch.float32)
    scaled = torch.where(scaled.isinf(), torch.nan, scaled)
    scales = ((exponent + 127) << 23).view(torch.float32)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantize(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of ``quantize`` in ``dtype``."""
    return (data.view(torch.float8_e4m3fn).float() * scales).to(dtype)


def _aligned(size: int, to: int) -> int:
    return (size + to - 1) // to * to
