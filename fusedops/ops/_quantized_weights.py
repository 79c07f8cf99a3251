"""Packed weights of 4 and 8 bits: rounding to codes, the packed layout, and the way back.

The layout is that of ``csrc/cpu/product/quantized_linear.h``: ``qweight`` ``[blocks, lines, 64]``
uint8 and ``scales`` ``[blocks, groups, 16]``, with blocks of 16 outputs.
"""

from __future__ import annotations

import torch

from fusedops._core.device_tensors import device_tensor

BLOCK = 16  # outputs of a block
FORMATS = {"int8": 4, "int4": 8, "nf4": 8}  # -> inputs of a line of 64 bytes
# Quantiles of a normal distribution: Dettmers et al., arXiv:2305.14314.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_ZERO_CODES = {"int8": 0, "int4": 8, "nf4": 7}
# The input, in a line, of each nibble of an output; the two halves of its four bytes are pairs of
# neighbours.
_INPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_INPUT = tuple(_INPUT_OF_NIBBLE.index(index) for index in range(8))


def num_groups(in_features: int, group: int) -> int:
    """Return the number of scales of an output; a ``group`` of 0 has all inputs."""
    if group == 0:
        return 1 if in_features else 0
    return -(-in_features // group)


def _expanded(scales_NG: torch.Tensor, in_features: int, group: int) -> torch.Tensor:
    """Return the scale of each weight, ``[N, K]``."""
    if group == 0:
        return scales_NG.expand(-1, in_features) if in_features else scales_NG
    return scales_NG.repeat_interleave(group, 1)[:, :in_features]


def quantize(
    weight_NK: torch.Tensor, format: str, group: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to the nearest codes.

    Args:
        weight_NK: ``[N, K]``, finite.
        format: of ``FORMATS``.
        group: inputs that share a scale; 0: all.
        scale_dtype: of the scales. Codes are chosen for the rounded scales.

    Returns:
        Codes ``[N, K]`` uint8 (int8: the bits of the signed number), and scales
        ``[N, groups]``.
    """
    rows, features = weight_NK.shape
    groups = num_groups(features, group)
    wide_NK = weight_NK.float()
    size = features if group == 0 else group
    padded = torch.nn.functional.pad(wide_NK, (0, groups * size - features))
    parts_NGS = padded.view(rows, groups, size)
    if format == "int4":
        # The extreme of a group gets the code -8, which has no positive counterpart.
        places = parts_NGS.abs().argmax(-1, keepdim=True) if parts_NGS.numel() else None
        extremes = parts_NGS.gather(-1, places)[..., 0] if places is not None else None
        scales_NG = wide_NK.new_zeros(rows, groups) if extremes is None else extremes / -8.0
    else:
        most = parts_NGS.abs().amax(-1) if parts_NGS.numel() else wide_NK.new_zeros(rows, groups)
        scales_NG = most / 127.0 if format == "int8" else most
    scales_NG = scales_NG.to(scale_dtype)
    divisors = scales_NG.float()
    divisors = torch.where(divisors == 0, 1.0, divisors)
    scaled = wide_NK / _expanded(divisors, features, group)
    if format == "int8":
        codes = scaled.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    elif format == "int4":
        codes = (scaled.round().clamp(-8, 7) + 8).to(torch.uint8)
    else:
        values = device_tensor(NF4, torch.float32, weight_NK.device)
        codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return codes, scales_NG


def pack(codes_NK: torch.Tensor, format: str) -> torch.Tensor:
    """Return codes ``[N, K]`` in the packed layout, ``[blocks, lines, 64]``."""
    outputs, features = codes_NK.shape
    depth = FORMATS[format]
    padding = (0, -features % depth, 0, -outputs % BLOCK)
    padded = torch.nn.functional.pad(codes_NK, padding, value=_ZERO_CODES[format])
    blocks, lines = padded.shape[0] // BLOCK, padded.shape[1] // depth
    parts = padded.view(blocks, BLOCK, lines, depth)
    if format == "int8":
        return parts.permute(0, 2, 3, 1).reshape(blocks, lines, 64)
    nibbles = parts.permute(0, 2, 1, 3)[..., list(_INPUT_OF_NIBBLE)]
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).reshape(blocks, lines, 64)


def unpack(qweight: torch.Tensor, format: str, out_features: int, in_features: int) -> torch.Tensor:
    """Return the codes ``[N, K]`` of a packed weight."""
    blocks, lines = qweight.shape[:2]
    depth = FORMATS[format]
    if format == "int8":
        parts = qweight.view(blocks, lines, depth, BLOCK).permute(0, 3, 1, 2)
    else:
        packed = qweight.view(blocks, lines, BLOCK, 4)
        nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        parts = nibbles[..., list(_NIBBLE_OF_INPUT)].permute(0, 2, 1, 3)
    return parts.reshape(blocks * BLOCK, lines * depth)[:out_features, :in_features]


def pack_scales(scales_NG: torch.Tensor) -> torch.Tensor:
    """Return scales ``[N, groups]`` as ``[blocks, groups, 16]``."""
    padded = torch.nn.functional.pad(scales_NG, (0, 0, 0, -scales_NG.shape[0] % BLOCK))
    return padded.view(-1, BLOCK, scales_NG.shape[1]).transpose(1, 2).contiguous()


def values_of(codes: torch.Tensor, format: str) -> torch.Tensor:
    """Return what codes stand for, float32."""
    if format == "int8":
        return codes.contiguous().view(torch.int8).float()
    if format == "int4":
        return codes.float() - 8.0
    return device_tensor(NF4, torch.float32, codes.device)[codes.int()]


def dequantize(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    *,
    in_features: int,
    out_features: int,
    format: str,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weight ``[N, K]``: value of the code times scale, rounded once to ``dtype``."""
    values = values_of(unpack(qweight, format, out_features, in_features), format)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales_NG = scales.to(wide).transpose(1, 2).flatten(0, 1)[:out_features]
    return (values.to(wide) * _expanded(scales_NG, in_features, group)).to(dtype)
