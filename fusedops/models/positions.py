"""What positions become: rotations of queries and keys, slopes of ALiBi."""

from __future__ import annotations

import math

import torch

from fusedops.models.config import RopeScaling, TransformerConfig


def rotary_tables(
    positions: torch.Tensor, config: TransformerConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of ``position * rope_theta ** (-2 i / head_dim)``.

    They are computed by each call: a buffer would be lost where a model is created on ``meta``, and
    rounded where it is cast.

    Args:
        positions: of the tokens, ``[S]`` or ``[B, S]``.
        config: has the size of a head, the base of the wave lengths, and how they are stretched.
        dtype: of the tables: float32, or float64 for float64.

    Returns:
        Two tables of the shape of ``positions`` and ``head_dim`` behind; each angle stands twice,
        in both halves.
    """
    width = config.size_of_head
    powers = torch.arange(0, width, 2, dtype=dtype, device=positions.device) / width
    frequencies = config.rope_theta**-powers
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    angles = positions.to(dtype)[..., None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _stretched(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # How often a wave goes round in a sequence of the first training.
    turns = frequencies * (scaling.original_seq_len / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """Return the slope of each head, ``[num_heads]`` float32.

    ``2 ** (-8 i / n)`` for ``i`` from 1 to ``n``, the largest power of two that is no more than the
    heads; those that are left take every second one of twice as many.

    Reference:
        Press et al.: Train Short, Test Long, arXiv:2108.12409.
    """
    power = 1 << (num_heads.bit_length() - 1)
    heads = torch.arange(num_heads, dtype=torch.float32, device=device)
    exponents = torch.where(heads < power, 2 * (heads + 1), 2 * (heads - power) + 1)
    return torch.exp2(-4 / power * exponents)
