"""Attention functions that exchange heads for tokens between processes around another function.

DeepSpeed's Ulysses puts such a wrapper in the place of an entry of ``AttentionInterface``: it
gathers the whole sequence for a part of the heads, calls the function that stood there, and goes
back. Stepping aside for it would be right, and leave the work between the exchanges to that
function. Instead a patched module calls a copy of the wrapper around the fused op.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_EXCHANGE = "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF"

# Wrapper -> its copy, ``None`` if it is no such wrapper.
_COPIES: dict[Callable[..., Any], Callable[..., Any] | None] = {}


def around(entry: Any, fused: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a copy of the wrapper ``entry`` around ``fused``, or ``None``.

    Args:
        entry: what stands in the place of ``sdpa``.
        fused: what takes the place of ``sdpa_attention_forward`` in it.
    """
    if entry not in _COPIES and not torch.compiler.is_compiling():
        _COPIES[entry] = _around(entry, fused)
    return _COPIES.get(entry)


def _around(entry: Any, fused: Callable[..., Any]) -> FunctionType | None:
    theirs = getattr(entry, "__closure__", None) or ()
    ours = tuple(_exchanged(cell, fused) for cell in theirs)
    if all(cell is other for cell, other in zip(ours, theirs, strict=True)):
        return None
    wrapper = FunctionType(
        entry.__code__, entry.__globals__, entry.__name__, entry.__defaults__, ours
    )
    wrapper.__kwdefaults__ = entry.__kwdefaults__
    return wrapper


def _exchanged(cell: CellType, fused: Callable[..., Any]) -> CellType:
    exchange: Any = cell.cell_contents
    kind = type(exchange)
    is_exchange = f"{kind.__module__}.{kind.__qualname__}" == _EXCHANGE
    if not is_exchange or exchange.attn is not sdpa_attention_forward:
        return cell
    exchange = copy.copy(exchange)
    exchange.attn = fused
    return CellType(exchange)
