"""Keys and values of the tokens that were seen, and attention over them.

A cache stands for ``Attention.core`` of each layer while the model runs, so that a model knows
nothing of it. The model sees one sequence, ``[1, T]``: at first all prompts behind one another, no
padding between them, then the newest token of each. A row of the cache is one prompt's.

Letters of shapes: R rows of the cache, T tokens of a call, N heads of the queries, M heads of keys
and values, C capacity, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fusedops import ops
from fusedops._core import checks

# Of a cache that grows: the tokens that it begins with.
_FIRST = 64


@dataclass(frozen=True)
class Call:
    """What the tokens of one call of the model are.

    Attributes:
        rows: of the cache that each belongs to, ``[tokens]``; padding behind them has none.
        positions: in their row, ``[tokens]``.
        ends: where prompts end that lie behind one another, from 0 on, padding the last;
            ``None``: each row has one new token.
        longest: tokens of the longest prompt.
        lengths: tokens of each row, new ones included, ``[R]`` int64.
        place: the position of all tokens, where each row has one and they are the same.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor | None
    longest: int
    lengths: torch.Tensor
    place: int | None = None


class Cache:
    """Keys and values of some rows, layer by layer.

    Args:
        layers: how many.
        capacity: tokens of a row for which there is room from the start; ``None``: it grows.
        most: tokens that a row may come to, where it grows.

    Attributes:
        capacity: tokens of a row for which there is room.
        copied: numbers that growing has copied so far.
    """

    def __init__(self, layers: int, capacity: int | None, most: int) -> None:
        self.capacity = min(_FIRST, most) if capacity is None else capacity
        self.copied = 0
        self._most = most
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers

    def reserve(self, tokens: int) -> None:
        """Make room for rows of so many tokens: at least twice the room that there was.

        Raises:
            ValueError: they are more than a row may come to.
        """
        if tokens > self._most:
            checks.fail("Decoder", "most", f"at least {tokens}, the tokens of a row", self._most)
        if tokens <= self.capacity:
            return
        capacity = min(self._most, max(tokens, 2 * self.capacity))
        for held in (self._keys, self._values):
            for index, each in enumerate(held):
                if each is not None:
                    held[index] = _enlarged(each, capacity)
                    self.copied += each.numel()
        self.capacity = capacity

    def select(self, rows: torch.Tensor, tokens: int) -> None:
        """Let row ``i`` hold what row ``rows[i]`` held; ``tokens`` is the longest of them."""
        for held in (self._keys, self._values):
            for index, each in enumerate(held):
                if each is not None:
                    held[index] = _selected(each, rows, tokens)

    def core(self, layer: int, call: Call) -> Callable[..., torch.Tensor]:
        """Return what stands for ``Attention.core`` of a layer during a call of the model."""

        def attend(
            query_1NTD: torch.Tensor,
            key_1MTD: torch.Tensor,
            value_1MTD: torch.Tensor,
            *,
            window: tuple[int, int] | None,
            alibi_slopes: torch.Tensor | None,
            **_: Any,
        ) -> torch.Tensor:
            if not len(query_1NTD):  # the second half of a batch of one under micro-batch overlap
                return query_1NTD
            # One view each: a token of a small model is as dear as what is done around its
            # products.
            query_TN1D, key_TM1D, value_TM1D = (
                each.permute(2, 1, 0, 3) for each in (query_1NTD, key_1MTD, value_1MTD)
            )
            keys_RMCD = self._write(self._keys, layer, call, key_TM1D)
            values_RMCD = self._write(self._values, layer, call, value_TM1D)
            if call.ends is not None:
                ends, longest = call.ends, call.longest
                output_TND = ops.attention_varlen(
                    query_TN1D.squeeze(2),
                    key_TM1D.squeeze(2),
                    value_TM1D.squeeze(2),
                    ends,
                    ends,
                    longest,
                    longest,
                    is_causal=True,
                    window=window,
                    alibi_slopes=alibi_slopes,
                )
                return output_TND.transpose(0, 1).unsqueeze(0)
            new, tokens = len(call.rows), len(query_TN1D)
            # The operator itself: what its function checks for each layer holds by the way that a
            # call is made.
            output_RN1D = torch.ops.fusedops.attention_decode(
                query_TN1D if new == tokens else query_TN1D[:new],
                keys_RMCD,
                values_RMCD,
                call.lengths,
                alibi_slopes,
                None,
                query_TN1D.shape[-1] ** -0.5,
                -1 if window is None else window[0],
                0.0,
            )[0]
            if new < tokens:
                output_RN1D = F.pad(output_RN1D, (0, 0, 0, 0, 0, 0, 0, tokens - new))
            return output_RN1D.permute(2, 1, 0, 3)

        return attend

    def _write(
        self,
        held: list[torch.Tensor | None],
        layer: int,
        call: Call,
        new_TM1D: torch.Tensor,
    ) -> torch.Tensor:
        """Keep the keys or values of a call; returns those of all tokens so far."""
        whole_RMCD, count = held[layer], len(call.rows)
        if whole_RMCD is None:
            _, heads, _, size = new_TM1D.shape
            shape = len(call.lengths), heads, self.capacity, size
            held[layer] = whole_RMCD = new_TM1D.new_empty(shape)
        new_TM1D = new_TM1D if count == len(new_TM1D) else new_TM1D[:count]
        if call.place is not None:
            whole_RMCD.narrow(2, call.place, 1).copy_(new_TM1D)
        else:
            places = call.rows, call.positions
            whole_RMCD.transpose(1, 2).index_put_(places, new_TM1D.squeeze(2))
        return whole_RMCD


def _enlarged(held_RMCD: torch.Tensor, capacity: int) -> torch.Tensor:
    rows, heads, before, size = held_RMCD.shape
    found = held_RMCD.new_empty(rows, heads, capacity, size)
    found[:, :, :before] = held_RMCD
    return found


def _selected(held_RMCD: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the rows; where there stay as many, those that stay are not copied."""
    if len(rows) != len(held_RMCD):
        return held_RMCD.index_select(0, rows)
    others = (rows != torch.arange(len(rows), device=rows.device)).nonzero().flatten()
    if len(others):
        held_RMCD[others, :, :tokens] = held_RMCD[rows[others], :, :tokens]
    return held_RMCD
