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
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor | None
    longest: int
    lengths: torch.Tensor


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
        """Make room for rows of so many tokens: at least twice the room that there was."""
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
            query_TND, key_TMD, value_TMD = (
                each[0].transpose(0, 1) for each in (query_1NTD, key_1MTD, value_1MTD)
            )
            keys_RMCD, values_RMCD = self._write(layer, call, key_TMD, value_TMD)
            if call.ends is not None:
                ends, longest = call.ends, call.longest
                output_TND = ops.attention_varlen(
                    query_TND,
                    key_TMD,
                    value_TMD,
                    ends,
                    ends,
                    longest,
                    longest,
                    is_causal=True,
                    window=window,
                    alibi_slopes=alibi_slopes,
                )
            else:
                new = len(call.rows)
                left = -1 if window is None else window[0]
                # The operator itself: what its function checks for each layer holds by the way
                # that a call is made.
                output_TND = torch.ops.fusedops.attention_decode(
                    query_TND[:new].unsqueeze(2),
                    keys_RMCD,
                    values_RMCD,
                    call.lengths,
                    alibi_slopes,
                    None,
                    query_TND.shape[-1] ** -0.5,
                    left,
                    0.0,
                )[0].squeeze(2)
                if new < len(query_TND):
                    output_TND = F.pad(output_TND, (0, 0, 0, 0, 0, len(query_TND) - new))
            return output_TND.transpose(0, 1).unsqueeze(0)

        return attend

    def _write(
        self, layer: int, call: Call, key_TMD: torch.Tensor, value_TMD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of a call; returns those of all tokens so far."""
        count = len(call.rows)
        found = []
        for held, new_TMD in ((self._keys, key_TMD), (self._values, value_TMD)):
            whole_RMCD = held[layer]
            if whole_RMCD is None:
                _, heads, size = new_TMD.shape
                shape = len(call.lengths), heads, self.capacity, size
                held[layer] = whole_RMCD = new_TMD.new_empty(shape)
            whole_RMCD.transpose(1, 2).index_put_((call.rows, call.positions), new_TMD[:count])
            found.append(whole_RMCD)
        return found[0], found[1]


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
