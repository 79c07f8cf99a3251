"""Attention on one device: rotations, slopes, and sequences that contain several documents.

Letters of shapes: B sequences, S tokens of each, N heads, D size of a head.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from fusedops import ops
from fusedops._core import philox
from fusedops._core.device_tensors import device_tensor
from fusedops.models.config import TransformerConfig
from fusedops.models.rotary import RopeScaling


class Documents:
    """Which tokens belong together: neighbours in a sequence that have the same id.

    Attributes:
        ids_BS: of the documents.
    """

    def __init__(self, ids_BS: torch.Tensor) -> None:
        self.ids_BS = ids_BS

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Return where documents end when all sequences lie behind one another, from 0 on."""
        begins = torch.ones_like(self.ids_BS, dtype=torch.bool)
        begins[:, 1:] = self.ids_BS[:, 1:] != self.ids_BS[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        return F.pad(starts, (0, 1), value=begins.numel()).int()

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return int(self.cu_seqlens.diff().max()) if self.ids_BS.numel() else 0


def attend(
    query_BNSD: torch.Tensor,
    key_BNSD: torch.Tensor,
    value_BNSD: torch.Tensor,
    *,
    is_causal: bool,
    window: tuple[int, int] | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    documents: Documents | None,
    seed: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``[B, N, S, Dv]``: each query's mean of the values that it may attend.

    The random number of a score follows from its index in ``[B, N, S, S]``, also with documents.
    """
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "window": window,
        "alibi_slopes": alibi_slopes,
        "scale": scale,
    }
    if documents is None:
        grouped = query_BNSD.shape[1] != key_BNSD.shape[1]
        options |= {"enable_gqa": grouped, "seed": seed}
        return ops.attention(query_BNSD, key_BNSD, value_BNSD, **options)
    if seed is not None and documents.ids_BS.numel():
        sequences, heads, length, _ = query_BNSD.shape
        tokens = torch.arange(sequences * length, device=seed.device)
        seed = philox.placed_scores(seed, heads, length)
        options["seed"] = philox.at_tokens(seed, tokens, tokens, length)
    cu_seqlens, longest = documents.cu_seqlens, documents.longest
    output = ops.attention_varlen(
        _packed(query_BNSD),
        _packed(key_BNSD),
        _packed(value_BNSD),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        **options,
    )
    return output.unflatten(0, documents.ids_BS.shape).transpose(1, 2)


def _packed(x_BNSD: torch.Tensor) -> torch.Tensor:
    """Return all sequences behind one another, ``[B * S, N, D]``: a view of a projection."""
    return x_BNSD.transpose(1, 2).flatten(0, 1)


def rotary_tables(
    positions: torch.Tensor, config: TransformerConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of ``position * rope_theta ** (-2 i / rotary_dim)``.

    They are computed by each call: a buffer would be lost where a model is created on ``meta``, and
    rounded where it is cast.

    Args:
        positions: of the tokens, ``[S]`` or ``[B, S]``.
        config: has the rotated size of a head, the base of the wave lengths, and how they are
            stretched.
        dtype: of the tables: float32, or float64 for float64.

    Returns:
        Two tables of the shape of ``positions`` and ``rotary_dim`` behind; each angle stands twice:
        in both halves, or in latent attention in neighbours.
    """
    angles = positions.to(dtype)[..., None] * frequencies(positions, config, dtype)
    cos, sin = angles.cos(), angles.sin()
    if config.rope_scaling is not None and config.rope_scaling.table_factor != 1:
        cos, sin = (table * config.rope_scaling.table_factor for table in (cos, sin))
    if config.is_latent:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def frequencies(
    positions: torch.Tensor, config: TransformerConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Return the angle of each pair for one token, ``[rotary_dim / 2]``; arguments as above."""
    width, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    powers = torch.arange(0, width, 2, dtype=dtype, device=positions.device) / width
    plain = theta**-powers
    if scaling is None:
        return plain
    if scaling.kind == "dynamic":
        length = _tokens(positions, config.seq_len).to(dtype)
        ratio = scaling.factor * length / config.seq_len - (scaling.factor - 1)
        return (theta * ratio ** (width / (width - 2))) ** -powers
    if scaling.kind == "longrope":
        short, long = (
            device_tensor(factors, dtype, positions.device)
            for factors in (scaling.short_factors, scaling.long_factors)
        )
        return plain / torch.where(_tokens(positions, 0) > scaling.original_seq_len, long, short)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # How often a wave goes round in a sequence of the first training.
        rotations = plain * (scaling.original_seq_len / (2 * math.pi))
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
    else:
        first, last = _yarn_bounds(scaling, width, theta)
        indices = torch.arange(width // 2, dtype=dtype, device=positions.device)
        kept = 1 - ((indices - first) / (last - first)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _tokens(positions: torch.Tensor, least: int) -> torch.Tensor:
    """Return the tokens of the longest sequence, without a look at the device."""
    lengths = positions.flatten() + 1
    return torch.cat((lengths, lengths.new_tensor([least]))).max()


def _yarn_bounds(scaling: RopeScaling, width: int, theta: float) -> tuple[float, float]:
    """Return the index up to which frequencies stay, and that from which on all are divided."""
    rotations = scaling.beta_fast, scaling.beta_slow
    waves = [scaling.original_seq_len / (number * 2 * math.pi) for number in rotations]
    first, last = (width * math.log(number) / (2 * math.log(theta)) for number in waves)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last != first else first + 0.001


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
