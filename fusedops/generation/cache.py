"""Keys and values of earlier tokens, and attention over them.

A ``KVCacheCall`` is the ``kv_cache`` of the model's ``ForwardContext`` for one call. The model gets
one sequence, ``[1, T]``: in the first call all prompts concatenated, without padding between them,
then the newest token of each. A row of the cache belongs to one sequence that is generated.

Letters of shapes: R rows of the cache, T tokens of a call, N query heads, M key and value heads,
C capacity, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fusedops import ops
from fusedops._core import checks

# Initial capacity of a cache that grows, in tokens.
_FIRST = 64


class KVCache:
    """Keys and values of some rows, layer by layer.

    Args:
        max_seq_len: most tokens that a row may have.

    Attributes:
        capacity: tokens of a row that are allocated.
    """

    def __init__(self, max_seq_len: int) -> None:
        self.capacity = min(_FIRST, max_seq_len)
        self._max_seq_len = max_seq_len
        # ``[R, M, C, D]``, by the layer and what they are
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Allocate rows of so many tokens: at least twice the capacity there was.

        Raises:
            ValueError: they are more than a row may have.
        """
        if tokens > self._max_seq_len:
            expected = f"at least {tokens}, the tokens of a row"
            checks.fail("Decoder", "max_seq_len", expected, self._max_seq_len)
        if tokens <= self.capacity:
            return
        capacity = min(self._max_seq_len, max(tokens, 2 * self.capacity))
        for key, cached in self.tensors.items():
            self.tensors[key] = F.pad(cached, (0, 0, 0, capacity - self.capacity))
        self.capacity = capacity

    def select(self, rows: torch.Tensor, tokens: int) -> None:
        """Let row ``i`` be what row ``rows[i]`` was; ``tokens`` is the length of the longest.

        If their number stays, rows that keep their place are not copied.
        """
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().flatten()
        for key, cached in self.tensors.items():
            if len(rows) != len(cached):
                self.tensors[key] = cached.index_select(0, rows)
            elif len(moved):
                cached[moved, :, :tokens] = cached[rows[moved], :, :tokens]


@dataclass(frozen=True)
class KVCacheCall:
    """A cache with the places in it of the tokens of one call of the model."""

    cache: KVCache
    rows: torch.Tensor  # of the cache, for each token, ``[tokens]``; padding after them has none
    positions: torch.Tensor  # in their row, ``[tokens]``
    # Cumulative lengths of concatenated prompts, padding the last; ``None``: each row has one new
    # token
    cu_seqlens: torch.Tensor | None
    longest: int  # tokens of the longest prompt
    lengths: torch.Tensor  # tokens of each row, new ones included, ``[R]`` int64
    same_position: bool = False  # whether each row has one token, all at the same position

    def attend(
        self,
        layer: int,
        query_1NTD: torch.Tensor,
        key_1MTD: torch.Tensor,
        value_1MTD: torch.Tensor,
        *,
        window: tuple[int, int] | None,
        alibi_slopes: torch.Tensor | None,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append keys and values of a layer; return ``[1, N, T, D]``, attention over all."""
        keys_RMCD = self.append((layer, "keys"), key_1MTD)
        values_RMCD = self.append((layer, "values"), value_1MTD)
        options = window, alibi_slopes, scale
        if self.cu_seqlens is not None:
            return self.attend_prompts(query_1NTD, key_1MTD, value_1MTD, *options)
        return self.attend_step(query_1NTD, keys_RMCD, values_RMCD, *options)

    def attend_prompts(
        self,
        query_1NTD: torch.Tensor,
        key_1MTD: torch.Tensor,
        value_1MTD: torch.Tensor,
        window: tuple[int, int] | None,
        alibi_slopes: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Return ``[1, N, T, D]``: attention of the tokens of each prompt."""
        assert self.cu_seqlens is not None
        output_TND = ops.attention_varlen(
            query_1NTD[0].transpose(0, 1),
            key_1MTD[0].transpose(0, 1),
            value_1MTD[0].transpose(0, 1),
            self.cu_seqlens,
            self.cu_seqlens,
            self.longest,
            self.longest,
            is_causal=True,
            window=window,
            alibi_slopes=alibi_slopes,
            scale=scale,
        )
        return output_TND.transpose(0, 1).unsqueeze(0)

    def attend_step(
        self,
        query_1NTD: torch.Tensor,
        keys_RMCD: torch.Tensor,
        values_RMCD: torch.Tensor,
        window: tuple[int, int] | None,
        alibi_slopes: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Return ``[1, N, T, D]``: attention of the new token of each row over the cache."""
        # One view: for one token of a small model views take as long as products.
        query_TN1D = query_1NTD.permute(2, 1, 0, 3)
        new, tokens = len(self.rows), len(query_TN1D)
        # The operator itself: what its function checks for each layer holds by the way that a
        # call is made.
        output_RN1D = torch.ops.fusedops.attention_decode(
            query_TN1D if new == tokens else query_TN1D[:new],
            keys_RMCD,
            values_RMCD,
            self.lengths,
            alibi_slopes,
            None,
            query_TN1D.shape[-1] ** -0.5 if scale is None else scale,
            -1 if window is None else window[0],
            0.0,
        )[0]
        if new < tokens:
            output_RN1D = F.pad(output_RN1D, (0, 0, 0, 0, 0, 0, 0, tokens - new))
        return output_RN1D.permute(2, 1, 0, 3)

    def append(self, key: tuple[int, str], new_1MTD: torch.Tensor) -> torch.Tensor:
        """Append what a layer keeps; return that of all tokens so far, ``[R, M, C, D]``.

        ``key`` is the layer and what it is: ``"keys"``, ``"values"``, or ``"latents"`` of latent
        attention.
        """
        new_TM1D = new_1MTD.permute(2, 1, 0, 3)
        count, tensors = len(self.rows), self.cache.tensors
        if key not in tensors:
            _, heads, _, size = new_TM1D.shape
            shape = len(self.lengths), heads, self.cache.capacity, size
            tensors[key] = new_TM1D.new_empty(shape)
        cached_RMCD = tensors[key]
        new_TM1D = new_TM1D if count == len(new_TM1D) else new_TM1D[:count]
        if self.same_position:
            cached_RMCD.index_copy_(2, self.positions[:1], new_TM1D)
        else:
            indices = self.rows, self.positions
            cached_RMCD.transpose(1, 2).index_put_(indices, new_TM1D.squeeze(2))
        return cached_RMCD
