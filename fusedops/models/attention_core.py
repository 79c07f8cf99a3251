"""Attention on one device: slopes, and sequences that contain several documents.

Letters of shapes: B sequences, S tokens of each, N heads, D size of a head.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from fusedops import ops
from fusedops._core import philox


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
